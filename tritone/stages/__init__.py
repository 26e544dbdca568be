"""The stages of the cascade, without Triton: messages in, messages out."""
