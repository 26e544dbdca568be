"""Times precisions on this machine, and chooses between them."""
