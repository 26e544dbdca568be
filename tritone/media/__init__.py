"""Audio and images of a request: checked, decoded, cut out of its messages, and made into features."""
