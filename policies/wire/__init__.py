"""Messages, connections and schemas of policy servers."""
