"""Vision-language-action policies: pictures, words and the arm's state to a chunk of actions."""
