"""Models of Hugging Face whose step can be predicted, by their configuration, without weights.

build = hugging_face("./config.json", batch=2, seq=None, dtype=torch.bfloat16)    # checked; nothing built yet

Models are built with random weights under fake tensors, which take no memory. All rows have the same length, without padding.
The kind of model determines the row: the first kind in `KINDS` that transformers has for the configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from chameleon_mm.tools.workload import BUILT_IN, Build, ModelUnusable, Workload, like_built_in, said_by, told_as

Inputs = dict[str, Tensor]

_MOST_TOKENS = 4096
"""Maximum default length of a row in tokens. Models that can read 128k tokens are not trained on such rows."""

_SAMPLES = 160_000
"""Default length of a row of sound: ten seconds at 16 kHz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of model: transformers' class for it, and the contents of a row of its batch."""

    name: str
    auto: str
    """Name of transformers' class that builds such a model from a configuration."""
    mapping: str
    """Name of transformers' mapping from configurations to models of this kind."""
    inputs: Callable[[Any, int, int], Inputs]
    """Function of configuration, rows and length of a row to the arguments of forward, including labels."""
    unit: str | None = "tokens"
    """Unit of --seq; None: the configuration has the size of a row."""
    length: Callable[[Any], int | None] = lambda config: getattr(config, "max_position_embeddings", None)
    """Function that returns the longest row that the model can read; None: any."""
    most: int = _MOST_TOKENS
    """Maximum default length of a row."""
    is_for: Callable[[Any], bool] = lambda config: True
    """Function that returns False for a configuration in the mapping that is trained as another kind."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of forward besides its inputs."""


def _ids(rows: int, tokens: int) -> Tensor:
    return torch.zeros(rows, tokens, dtype=torch.int64)


def _text(config: Any, rows: int, tokens: int) -> Inputs:
    ids = _ids(rows, tokens)
    return {"input_ids": ids, "labels": ids}


def _image(config: Any, rows: int, _: int) -> Inputs:
    config = getattr(config, "vision_config", config)
    side = config.image_size
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    labels = torch.zeros(rows, dtype=torch.int64)
    return {"pixel_values": torch.zeros(rows, config.num_channels, height, width), "labels": labels}


def _speech(config: Any, rows: int, tokens: int) -> Inputs:
    frames = 2 * config.max_source_positions  # the encoder's convolution halves them
    return {"input_features": torch.zeros(rows, config.num_mel_bins, frames), "labels": _ids(rows, tokens)}


def _sound(config: Any, rows: int, samples: int) -> Inputs:
    return {"input_values": torch.zeros(rows, samples), "labels": torch.zeros(rows, dtype=torch.int64)}


KINDS = (
    Kind(
        name="speech to text", auto="AutoModelForSpeechSeq2Seq", mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", inputs=_speech,
        length=lambda config: getattr(config, "max_target_positions", None),
    ),
    Kind(
        name="text to text", auto="AutoModelForSeq2SeqLM", mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", inputs=_text,
        length=lambda config: getattr(config, "max_position_embeddings", getattr(config, "n_positions", None)),
    ),
    Kind(
        name="masked language model", auto="AutoModelForMaskedLM", mapping="MODEL_FOR_MASKED_LM_MAPPING", inputs=_text,
        is_for=lambda config: not getattr(config, "is_decoder", False),
    ),
    Kind(
        name="causal language model", auto="AutoModelForCausalLM", mapping="MODEL_FOR_CAUSAL_LM_MAPPING", inputs=_text,
        options={"use_cache": False},
    ),
    Kind(
        name="image classification", auto="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", inputs=_image, unit=None,
    ),
    Kind(
        name="sound classification", auto="AutoModelForAudioClassification",
        mapping="MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", inputs=_sound, unit="samples",
        length=lambda config: None, most=_SAMPLES,
    ),
)  # fmt: skip
"""Kinds of models, in the order of the search."""


def hugging_face(text: str, *, batch: int, seq: int | None, dtype: torch.dtype, layers: int | None = None) -> Build:
    """Builder of the model whose configuration is the file or folder `text`, or is published under that name.

    Raises `ModelUnusable` without transformers, and for a configuration that cannot be read or used.
    """
    if find_spec("transformers") is None:
        raise ModelUnusable(
            f"MODEL: expected a built-in model ({', '.join(BUILT_IN)}) or module:function, got {text!r}; a Hugging Face "
            f"configuration needs transformers, which is not installed: pip install 'chameleon-mm[plan]'"
        )
    transformers: Any = importlib.import_module("transformers")  # as Any: type checkers would follow all of it
    config = _config(transformers, text)
    kind = _kind(transformers, text, config)
    if kind.unit is None and seq is not None:
        raise ModelUnusable(f"--seq: expected none for {text}, whose configuration has the size of an image; leave it out")
    if layers is not None:
        config = _with_layers(config, text, layers)
    longest = kind.length(config)
    length = min(longest or kind.most, kind.most) if seq is None else seq
    notes = ["rows are whole: no padding, so attention needs no mask"] if kind.unit == "tokens" else []
    if longest is not None and length > longest:
        notes.append(f"rows are longer than the {longest} tokens that the model can read")
    if getattr(config, "quantization_config", None) is not None:
        notes.append("its quantization_config is ignored: weights are trained, and planned, as they are before it")
    if drawn := [name for name in _DRAWN if getattr(config, name, None)]:
        notes.append(f"{' and '.join(drawn)} off: what a step then leaves out or hides depends on numbers that are drawn")
    changes: dict[str, Any] = {name: type(getattr(config, name))(0) for name in drawn}
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        changes["decoder_start_token_id"] = 0  # the token that a decoder's row begins with: only shapes count
    config = _changed(config, changes)

    def build() -> Workload:
        with told_as(f"{text}: transformers could not build it under fake tensors"):
            model: nn.Module = getattr(transformers, kind.auto).from_config(
                config, dtype=dtype, attn_implementation=fused_attention(transformers, config)
            )
            given = kind.inputs(config, batch, length)
        model.train()
        inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}

        def loss() -> Tensor:
            return cast(Tensor, model(**inputs, **kind.options).loss)

        row = f"{length} {kind.unit}" if kind.unit else " x ".join(map(str, inputs["pixel_values"].shape[1:]))
        about = f"{text} ({type(model).__name__}), {batch} x {row}"
        return Workload(about=about, model=model, loss=loss, notes=tuple(notes))

    return build


_DRAWN = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")
"""Settings that make a training step depend on drawn numbers, which fake tensors lack."""


def _kind(transformers: Any, text: str, config: Any) -> Kind:
    for kind in KINDS:
        if type(config) in getattr(transformers, kind.mapping) and kind.is_for(config):
            return kind
    raise ModelUnusable(
        f"MODEL: expected the configuration of one of: {', '.join(kind.name for kind in KINDS)}; got {text!r}, a "
        f"{type(config).__name__}; give it as module:function"
    )


def _changed(config: Any, settings: dict[str, Any]) -> Any:
    return type(config).from_dict({**config.to_dict(), **settings}) if settings else config


def _with_layers(config: Any, text: str, layers: int) -> Any:
    """Copy the configuration with another number of layers; the kinds of layers repeat in order."""
    told = config.to_dict()
    if "num_hidden_layers" not in told:
        raise ModelUnusable(
            f"--largest layers: expected a configuration with num_hidden_layers, got {text!r}, a {type(config).__name__} "
            f"without; search for another size"
        )
    kinds = told.get("layer_types")
    repeated = {"layer_types": [kinds[i % len(kinds)] for i in range(layers)]} if kinds else {}
    return _changed(config, {"num_hidden_layers": layers, **repeated})


def fused_attention(transformers: Any, config: Any) -> str:
    """Register fused attention without a mask, for rows without padding, and return its name.

    On a GPU, transformers drops a mask that hides nothing. It cannot read the values of fake tensors, so it would keep a mask
    for each layer, as large as a matrix of scores.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"  # torch's fused attention cannot cap scores
    name = "chameleon_mm_whole_rows"
    transformers.AttentionInterface.register(name, transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"])
    transformers.AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    return name


def _config(transformers: Any, text: str) -> Any:
    is_path = Path(text).exists()
    try:
        return transformers.AutoConfig.from_pretrained(text, local_files_only=not is_path and not _answers(text))
    except Exception as error:  # the hub's client raises many kinds of network errors, with one meaning here
        if is_path:
            expected, way_out = "a configuration that transformers can read", "is it a config.json, or a folder with one?"
            reason = said_by(error)
        else:
            expected = f"a built-in model ({', '.join(BUILT_IN)}), module:function, or a Hugging Face configuration"
            likely = like_built_in(text, cutoff=0.55)
            way_out = "a name needs the network, or an earlier download" + (f"; {likely}?" if likely else "")
            reason = next(iter(said_by(error).split(". ")))  # the rest is advice about the hub
        raise ModelUnusable(f"MODEL: expected {expected}, got {text!r}: {reason}; {way_out}") from error


@cache
def _answers(name: str) -> bool:
    """True if the hub answers one request for the configuration of `name`, even with an error.

    Otherwise transformers would try six times, for half a minute. Offline it finds earlier downloads.
    """
    hub: Any = importlib.import_module("huggingface_hub")
    with suppress(Exception):  # many kinds of network errors, with one meaning here
        with suppress(hub.errors.HfHubHTTPError, hub.errors.HFValidationError):  # which transformers explains
            hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"))
        return True
    return False
