"""Who may do what in a bucket: its owner, its policy, its grants and those of its objects."""
