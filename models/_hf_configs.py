"""`config.json` of a Hugging Face checkpoint as a configuration of ours.

What a checkpoint asks for and our models do not do is refused, never left out.
"""

from collections.abc import Mapping
from typing import Any

from remat.models._errors import CheckpointError
from remat.models._rotary import RopeScaling
from remat.models.gpt2 import GPT2Config
from remat.models.llama import LlamaConfig
from remat.models.mixtral import MixtralConfig
from remat.models.vit import ViTConfig

Settings = Mapping[str, Any]


def gpt2_config(settings: Settings) -> GPT2Config:
    """A GPT-2."""
    d_model = _needed(settings, "n_embd")
    _expect(settings, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _expect(settings, "n_inner", None, 4 * d_model)
    _expect(settings, "scale_attn_weights", True)
    _expect(settings, "scale_attn_by_inverse_layer_idx", False)
    _expect(settings, "add_cross_attention", False)
    _expect(settings, "tie_word_embeddings", True)
    return GPT2Config(
        n_layers=_needed(settings, "n_layer"),
        n_heads=_needed(settings, "n_head"),
        d_model=d_model,
        vocab_size=_needed(settings, "vocab_size"),
        n_positions=_needed(settings, "n_positions"),
        norm_epsilon=settings.get("layer_norm_epsilon", 1e-5),
    )


def llama_config(settings: Settings) -> LlamaConfig:
    """A Llama."""
    return LlamaConfig(
        **_llama_fields(settings),
        tie_embeddings=settings.get("tie_word_embeddings", False),
    )


def mixtral_config(settings: Settings) -> MixtralConfig:
    """A Mixtral."""
    _expect(settings, "tie_word_embeddings", False)
    _expect(settings, "sliding_window", None)
    return MixtralConfig(
        **_llama_fields(settings),
        n_experts=_needed(settings, "num_local_experts"),
        n_experts_per_token=_needed(settings, "num_experts_per_tok"),
        load_balance_weight=settings.get("router_aux_loss_coef", 0.001),
    )


def vit_config(settings: Settings) -> ViTConfig:
    """A ViT classifier."""
    d_model = _needed(settings, "hidden_size")
    _expect(settings, "hidden_act", "gelu")
    _expect(settings, "intermediate_size", 4 * d_model)
    _expect(settings, "qkv_bias", True)
    image_size = _needed(settings, "image_size")
    patch_size = _needed(settings, "patch_size")
    # Files written by default values alone leave the two labels out.
    labels = settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    return ViTConfig(
        n_layers=_needed(settings, "num_hidden_layers"),
        n_heads=_needed(settings, "num_attention_heads"),
        d_model=d_model,
        image_size=image_size,
        patch_size=patch_size,
        position_grid=image_size // patch_size,
        n_channels=settings.get("num_channels", 3),
        n_classes=len(labels),
        norm_epsilon=settings.get("layer_norm_eps", 1e-12),
    )


def _llama_fields(settings: Settings) -> dict[str, Any]:
    d_model = _needed(settings, "hidden_size")
    n_heads = _needed(settings, "num_attention_heads")
    _expect(settings, "hidden_act", "silu")
    _expect(settings, "attention_bias", False)
    _expect(settings, "mlp_bias", False)
    _expect(settings, "head_dim", None, d_model // n_heads)
    theta, scaling = _rope(settings)
    return {
        "n_layers": _needed(settings, "num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": settings.get("num_key_value_heads") or n_heads,
        "d_model": d_model,
        "d_mlp": _needed(settings, "intermediate_size"),
        "vocab_size": _needed(settings, "vocab_size"),
        "norm_epsilon": settings.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _rope(settings: Settings) -> tuple[float, RopeScaling | None]:
    """Theta and scaling: transformers 5 keeps both in one place, 4 apart."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"rotary positions of type {kind!r} are not here; default and llama3 are"
        )
    return theta, RopeScaling(
        factor=_needed(rope, "factor"),
        low_frequency_factor=_needed(rope, "low_freq_factor"),
        high_frequency_factor=_needed(rope, "high_freq_factor"),
        original_context=_needed(rope, "original_max_position_embeddings"),
    )


def _needed(settings: Settings, field: str) -> Any:
    if field not in settings:
        raise CheckpointError(f"config.json lacks {field!r}")
    return settings[field]


def _expect(settings: Settings, field: str, *values: Any) -> None:
    """Refuses a field that is there and says something our model does not do."""
    if field in settings and settings[field] not in values:
        raise CheckpointError(
            f"config.json says {field} = {settings[field]!r}; models here have "
            f"{' or '.join(map(repr, values))}"
        )
