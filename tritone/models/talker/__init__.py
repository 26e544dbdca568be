"""A small autoregressive Talker that asks for its text: streaming phonemes in, speech codes out.

One causal decoder (Qwen3's layout) over a sequence that mixes text and speech. Each step gives a token of codebook 0:
a speech code, whose residual codes the code predictor adds, or READ, which asks for the next unit of text. The next
position's input is then the sum of the frame's code embeddings, or READ's embedding plus the unit's vector. A sequence
whose text has not come yet waits; it ends when it asks and the text has ended. Unit vectors come from a small
convolutional encoder over a whole clause, plus the projected hidden state of the Thinker's token, if there is one.

``config``, ``text`` and ``context`` need neither torch nor the weights; ``model`` is the network as it is trained;
``generate`` runs it, sequence by sequence, and is what the engine must agree with; ``served`` is what the engine runs.
``heart/`` holds the voice that comes along; ``training/voice`` made it.
"""
