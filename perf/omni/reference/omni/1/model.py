"""transformers' ``generate`` of an omni checkpoint as one Triton model: text as it is made, then the whole sound."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

SAMPLE_RATE = 24000


class TritonPythonModel:
    def initialize(self, args):
        import torch
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

        from tritone.backend import end_with_parent
        from tritone.deployment import Deployment

        end_with_parent()
        deployment = Deployment.from_environment()
        torch.set_num_threads(deployment.decode.threads)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(deployment.checkpoint)
        self._model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(deployment.checkpoint, dtype=torch.float32).eval()
        limits = json.loads((Path(deployment.checkpoint) / "generation_config.json").read_text())
        # A frame's residual codes are made in the step after it.
        self._frames = limits["talker_max_new_tokens"] + 1
        self._generate("Hello", 4, lambda text: None, frames=16)

    def execute(self, requests):
        for request in requests:
            self._answer(request)

    def _answer(self, request):
        sender = request.get_response_sender()
        options = json.loads(request.parameters())
        asked = pb_utils.get_input_tensor_by_name(request, "messages").as_numpy()[0].decode()
        sent = 0

        def send(kind, **tensors):
            nonlocal sent
            tensors |= {"index": np.array([sent], np.int32), "event": np.array([kind.encode()], np.object_)}
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()]))
            sent += 1

        tokens = options["max_tokens"]
        sound = self._generate(
            asked, tokens, lambda text: send("text", text=np.array([text.encode()], np.object_)), self._frames
        )
        send("audio", audio=sound)
        usage = {"completion_tokens": tokens, "audio_seconds": len(sound) / SAMPLE_RATE}
        send("end", info=np.array([json.dumps({"finish_reason": "length", "usage": usage}).encode()], np.object_))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _generate(self, asked, tokens, tell, frames):
        """Samples float32 [M]; ``tell`` gets the text, token by token."""
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
        )
        ids = self._torch.tensor([self._tokenizer.encode(prompt)])
        _, sound = self._model.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            thinker_max_new_tokens=tokens,
            thinker_eos_token_id=None,
            thinker_do_sample=False,
            thinker_streamer=_Streamer(self._tokenizer.backend_tokenizer, tell),
            talker_max_new_tokens=frames,
            talker_do_sample=False,
        )
        return sound[0, 0].numpy()


class _Streamer:
    """What ``generate`` wants: ``put`` gets the prompt first, then each token."""

    def __init__(self, tokenizer, tell):
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tell = tell
        self._prompt = True

    def put(self, value):
        if self._prompt:
            self._prompt = False
            return
        text = self._stream.step(self._tokenizer, int(value[0]))
        if text:
            self._tell(text)

    def end(self):
        pass
