"""Tiny checkpoints of Qwen3-Omni and Qwen2.5-Omni with random weights, as ``save_pretrained`` writes them, made offline.

Every matrix is drawn here, normal with variance 1 / inputs, from a fixed seed: transformers leaves some of them as memory
was found, and with its own deviation of 0.02 the waveform would be silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HIDDEN = 128
VOCABULARY = 640
VOCODER_GAIN = 0.7
"""At 1 the waveform saturates."""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN25 = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>",
          "<|VIDEO|>", "<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>"]
QWEN3 = ["<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>",
         "<|audio_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
# "system", "user" and "assistant" must each become one token: the talkers find a prompt's parts by them.
TEXT = [
    "The quick brown fox jumps over the lazy dog.", "Hello, how are you today? I am fine, thank you.",
    "You are a helpful assistant.", *["system", "user", "assistant"] * 20, "Describe this sound in one sentence please.",
    "one two three four five six seven eight nine ten", "text speech audio image video model server request",
] * 4
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'audio' or 'audio' in c %}AUDIO{% elif c['type'] == 'image' or 'image' in c %}IMAGE"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(specials: list[str], extra: dict[str, str], audio: str, image: str) -> Any:
    """A byte-level BPE of ``TEXT``; ``audio`` and ``image`` are what the chat template puts for one of them."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=512, show_progress=False, initial_alphabet=alphabet))
    model = json.loads(tokenizer.to_str())["model"]
    made = transformers.Qwen2TokenizerFast(
        vocab=model["vocab"],
        merges=[tuple(merge) if not isinstance(merge, str) else tuple(merge.split(" ")) for merge in model["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        model_max_length=32768,
        additional_special_tokens=specials[2:],
        extra_special_tokens=extra,
    )
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in specials], special_tokens=True)
    made.chat_template = TEMPLATE.replace("AUDIO", audio).replace("IMAGE", image)
    return made


def _save_processor(directory: Path, kind: str, **image: Any) -> None:
    """``processor_config.json`` as the processor ``kind`` writes it, which itself needs torchvision."""
    edges = {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}
    parts: dict[str, Any] = {
        "feature_extractor": transformers.WhisperFeatureExtractor(
            feature_size=128, sampling_rate=16000, hop_length=160, chunk_length=300, n_fft=400, return_attention_mask=True
        ).to_dict(),
        "image_processor": Qwen2VLImageProcessorPil(size=edges, temporal_patch_size=2, merge_size=2, **image).to_dict()
        | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", "temporal_patch_size": 2, "merge_size": 2}
        | image,
        "processor_class": kind,
    }
    (directory / "processor_config.json").write_text(json.dumps(parts, indent=2))


def _ids(tokenizer: Any, *names: str) -> list[int]:
    return list(tokenizer.convert_tokens_to_ids(list(names)))


def _random(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = cls._from_config(config).eval()
    draw = torch.Generator().manual_seed(1)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                assert torch.isfinite(parameter).all(), name
                continue
            # Stacked experts are [experts, out, in]; a convolution's inputs are all but its first dimension.
            inputs = parameter[0].numel() if parameter.dim() > 2 and "experts" not in name else parameter.shape[-1]
            deviation = 0.5 if id(parameter) in embeddings else inputs**-0.5 * (VOCODER_GAIN if "2wav" in name else 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * deviation)
    return model.to(dtype)


def make_qwen3_omni(directory: Path, dtype: torch.dtype = torch.float32, *, endless: bool = False) -> Any:
    """``Qwen3OmniMoeForConditionalGeneration``; gives the model that was saved. ``endless``: its speech, if greedy, ends by the
    limit of frames alone."""
    hidden, talker_hidden, groups, codebook = HIDDEN, 96, 4, 64
    first, speaker = codebook + 1, codebook + 11
    extra = {"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
             "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
             "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    tokenizer = make_tokenizer(SPECIALS + QWEN3, extra, "<|audio_start|><|audio_pad|><|audio_end|>",
                               "<|vision_start|><|image_pad|><|vision_end|>")
    audio, audio_begin, audio_end, vision_begin, vision_end, image, video = _ids(
        tokenizer, "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<|vision_start|>", "<|vision_end|>",
        "<|image_pad|>", "<|video_pad|>")
    pad, begin, end = _ids(tokenizer, "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
    end_of_text, turn_begin, turn_end = _ids(tokenizer, *SPECIALS)
    roles = {role: tokenizer.encode(role) for role in ("system", "user", "assistant")}
    assert all(len(tokens) == 1 for tokens in roles.values()), roles
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6], "interleaved": True,
            "mrope_interleaved": True}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    media = {"audio_token_id": audio, "image_token_id": image, "video_token_id": video, "audio_start_token_id": audio_begin,
             "position_id_per_seconds": 13, "vision_start_token_id": vision_begin}
    thinker = {
        "audio_config": {"num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
                         "d_model": 64, "output_dim": hidden, "n_window": 50, "n_window_infer": 400,
                         "downsample_hidden_size": 32},
        "vision_config": {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": hidden,
                          "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "patch_size": 16},
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 4,
                        **heads, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
                        "rope_parameters": rope, "eos_token_id": turn_end, "pad_token_id": end_of_text,
                        "bos_token_id": end_of_text},
        "audio_end_token_id": audio_end, "user_token_id": roles["user"][0], "vision_end_token_id": vision_end, **media,
    }
    # The upper 1024 ids of the talker's vocabulary are those of its special codes.
    talker = {
        "text_config": {"vocab_size": codebook + 1024, "hidden_size": talker_hidden, "intermediate_size": 192,
                        "num_hidden_layers": 3, **heads, "moe_intermediate_size": 64, "num_experts": 8,
                        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64, "rope_parameters": rope},
        "code_predictor_config": {"vocab_size": codebook, "hidden_size": talker_hidden, "intermediate_size": 192,
                                  "num_hidden_layers": 2, **heads, "num_code_groups": groups, "rope_parameters": plain},
        "num_code_groups": groups, "thinker_hidden_size": hidden, "accept_hidden_layer": 2, "codec_pad_id": first,
        "codec_bos_id": first + 1, "codec_eos_token_id": first + 2, "codec_nothink_id": first + 7,
        "codec_think_bos_id": first + 8, "codec_think_eos_id": first + 9, "spatial_merge_size": 2,
        "speaker_id": {"chelsie": speaker, "ethan": speaker + 1, "aiden": speaker + 2}, **media,
    }
    vocoder = {"codebook_size": codebook, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
               "intermediate_size": 128, "num_hidden_layers": 2, "num_quantizers": groups, "sliding_window": 72,
               "decoder_dim": 96, "rope_parameters": plain}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker, talker_config=talker, code2wav_config=vocoder, im_start_token_id=turn_begin,
        im_end_token_id=turn_end, tts_pad_token_id=pad, tts_bos_token_id=begin, tts_eos_token_id=end,
        system_token_id=roles["system"][0], user_token_id=roles["user"][0], assistant_token_id=roles["assistant"][0],
    )
    model = _random(transformers.Qwen3OmniMoeForConditionalGeneration, config, dtype)
    if endless:
        # A logit of 0 is never the largest of 64 random ones.
        model.talker.codec_head.weight.data[talker["codec_eos_token_id"]] = 0
    model.generation_config.eos_token_id = turn_end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _save_processor(directory, "Qwen3OmniMoeProcessor", patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return model


def make_qwen25_omni(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """``Qwen2_5OmniForConditionalGeneration``; gives the model that was saved."""
    hidden, codes, code_pad = HIDDEN, 256, 257
    extra = {"image_token": "<|IMAGE|>", "audio_token": "<|AUDIO|>", "video_token": "<|VIDEO|>",
             "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
             "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tokenizer = make_tokenizer(SPECIALS + QWEN25, extra, "<|audio_bos|><|AUDIO|><|audio_eos|>",
                               "<|vision_bos|><|IMAGE|><|vision_eos|>")
    audio, audio_begin, audio_end, vision_begin, vision_end, image, video = _ids(
        tokenizer, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>")
    pad, begin, end = _ids(tokenizer, "<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>")
    end_of_text, turn_end = _ids(tokenizer, "<|endoftext|>", "<|im_end|>")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    media = {"audio_token_index": audio, "image_token_index": image, "video_token_index": video,
             "position_id_per_seconds": 25, "seconds_per_chunk": 2, "audio_start_token_id": audio_begin,
             "audio_end_token_id": audio_end, "vision_start_token_id": vision_begin, "vision_end_token_id": vision_end}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    thinker = {
        "audio_config": {"num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
                         "d_model": 64, "output_dim": hidden, "n_window": 100, "max_source_positions": 1500},
        "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": hidden,
                          "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 112},
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 256, "num_hidden_layers": 4,
                        **heads, "max_position_embeddings": 32768, "rope_parameters": rope, "eos_token_id": turn_end,
                        "pad_token_id": end_of_text, "bos_token_id": end_of_text, "tie_word_embeddings": False},
        "user_token_id": tokenizer.encode("user")[0], **media,
    }
    vocabulary = codes + 16
    talker = {
        "vocab_size": vocabulary, "tts_text_start_token_id": begin, "tts_text_end_token_id": end,
        "tts_text_pad_token_id": pad, "tts_codec_pad_token_id": code_pad, "tts_codec_start_token_id": code_pad + 1,
        "tts_codec_end_token_id": code_pad + 2, "tts_codec_mask_token_id": code_pad + 4, "embedding_size": hidden,
        "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, **heads, "head_dim": 32,
        "rope_parameters": rope, **media,
    }
    token2wav = {
        # Every id of the talker must have an embedding here: with random weights it draws any of them.
        "dit_config": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 32, "emb_dim": 32,
                       "block_size": 24, "look_ahead_layers": [1], "look_backward_layers": [0], "num_embeds": vocabulary,
                       "mel_dim": 80, "enc_emb_dim": 16, "enc_dim": 16, "enc_channels": [32, 32, 32, 32, 96],
                       "enc_attention_channels": 16, "enc_se_channels": 16},
        "bigvgan_config": {"mel_dim": 80, "upsample_initial_channel": 64},
    }
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker, talker_config=talker, token2wav_config=token2wav)
    model = _random(transformers.Qwen2_5OmniForConditionalGeneration, config, dtype)
    model.token2wav.float()
    model.generation_config.eos_token_id = turn_end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _save_processor(directory, "Qwen2_5OmniProcessor", patch_size=14)
    draw = torch.Generator().manual_seed(1)
    speakers = {
        name: {"cond": torch.randn(1, 16, generator=draw), "ref_mel": torch.randn(1, 60, 80, generator=draw),
               "bos_token": begin}
        for name in ("Chelsie", "Ethan")
    }
    torch.save(speakers, directory / "spk_dict.pt")
    return model
