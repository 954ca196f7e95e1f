"""Other codecs of KV caches, re-created to be compared with: a module each, whose docstring says which reading it takes."""
