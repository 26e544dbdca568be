"""Trains the demo's autoregressive Talker: `make train-voice`.

texts (sentences from packages) -> answers -> the hibari voice speaks them, clause by clause -> codes and alignments ->
training -> an exported voice directory. Everything made lies under the cache; every step resumes where it stopped.
"""
