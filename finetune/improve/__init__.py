"""`burnish improve`: the methods that fit a base race on one budget, and one policy is delivered."""
