"""Smaller sizes for a configuration: the same architecture, small enough to train in a moment.

Owns the names configurations use for sizes and the rules that keep them consistent (heads divide
the width, token ids stay inside the vocabulary, every kind of layer stays). Knows transformers' and
diffusers' settings as plain dictionaries, no torch. Called by `small_copy`, which builds the result
and so finds out whether it is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError

Names = tuple[str, ...]

NUM_LAYERS = 3
VOCABULARY = 256
NUM_POSITIONS = 64
_NUM_HEADS = 2
"""Of keys and values; queries have twice as many where they have more at all."""
_HEAD_WIDTH = 16
_IMAGE_HEAD_WIDTH = 24
"""Widths of image models must be multiples of 3 (sizes as conditions) and of 4 (positions)."""
_WIDTH = 64
_LEAST_WIDTH = 16
_NUM_EXPERTS = 4
_WINDOW = 8

_LAYERS: Names = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_single_layers", "num_refiner_layers"),
)
_HEADS: Names = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KEY_VALUE_HEADS: Names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_WIDTHS: Names = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
_WIDTHS: Names = ("hidden_size", "n_embd", "d_model", "dim")
_SAME_WIDTHS: Names = (
    *("word_embed_proj_dim", "embedding_size", "embed_dim", "lru_width"),
    *("attention_hidden_size", "block_dim", "conv_dim", "conv_dim_out"),
)
_INNER: Names = (
    *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "inner_dim"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_dim"),
    *("shared_expert_intermediate_size", "intermediate_size_mlp", "block_ff_dim"),
)
_POSITIONS: Names = (
    *("n_positions", "n_ctx", "max_position_embeddings"),
    *("max_target_positions", "max_source_positions"),
)
_AT_MOST = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _NUM_EXPERTS),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_layer"), _NUM_EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "n_groups", "attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "attn_layer_offset"), 1),
    **dict.fromkeys(("expert_layer_offset",), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_n_groups",), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), _WINDOW),
}
_IMAGE_AT_MOST = {
    "sample_size": 8,
    "pos_embed_max_size": 16,
    "num_embeds_ada_norm": 16,
    **dict.fromkeys(("cross_attention_dim", "caption_channels", "joint_attention_dim"), 32),
    **dict.fromkeys(("pooled_projection_dim", "text_embed_dim"), 32),
}
_IMAGE_WIDTHS = ("cross_attention_dim", "caption_projection_dim", "hidden_size", "inner_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSettings:
    """A configuration with smaller sizes, and what was changed in it."""

    settings: dict[str, Any]
    changes: tuple[str, ...]


def scale_transformers(settings: Mapping[str, Any]) -> ScaledSettings:
    """Scale the settings of a transformers configuration, its parts (`text_config`) included.

    Args:
        settings: all of them, defaults too (`config.to_dict()`).

    Raises:
        ConfigError: no number of layers is found.
    """
    scaled = {key: value for key, value in settings.items() if key != "quantization_config"}
    _scale_ids(scaled)
    num_found = _scale_part(scaled)
    for key, value in scaled.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            part = dict(value)
            _scale_ids(part)
            num_found += _scale_part(part)
            scaled[key] = part
    if not num_found:
        raise _not_scalable("no setting that counts layers was found", _LAYERS)
    return ScaledSettings(settings=scaled, changes=changes_between(settings, scaled))


def scale_diffusers(settings: Mapping[str, Any]) -> ScaledSettings:
    """Scale the settings of a diffusers transformer.

    Raises:
        ConfigError: it is not a transformer whose sizes are understood.
    """
    scaled = dict(settings)
    heads: Any = scaled.get("num_attention_heads")
    head_width: Any = scaled.get("attention_head_dim")
    if not (_is_count(heads) and _is_count(head_width) and _is_count(scaled.get("num_layers"))):
        raise _not_scalable(
            "num_layers, num_attention_heads and attention_head_dim are not all there as numbers",
            ("num_layers", "num_attention_heads", "attention_head_dim"),
        )
    width = heads * head_width
    scaled["num_attention_heads"] = min(heads, _NUM_HEADS)
    scaled["attention_head_dim"] = min(head_width, _IMAGE_HEAD_WIDTH)
    smaller = scaled["num_attention_heads"] * scaled["attention_head_dim"]
    _scale_layers(scaled)
    if scaled.get("sample_size") == 128 and scaled.get("use_additional_conditions", 0) is None:
        # What the model concludes from the size of its images.
        scaled["use_additional_conditions"] = True
    for key, most in _IMAGE_AT_MOST.items():
        if _is_count(scaled.get(key)):
            scaled[key] = min(scaled[key], most)
    for key in _IMAGE_WIDTHS:
        if settings.get(key) == width:
            scaled[key] = smaller
    axes = scaled.get("axes_dims_rope")
    if isinstance(axes, list | tuple) and sum(axes) == head_width:
        scaled["axes_dims_rope"] = _even_parts(axes, scaled["attention_head_dim"])
    return ScaledSettings(settings=scaled, changes=changes_between(settings, scaled))


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What differs, as `hidden_size 4096 -> 64`; lists and parts by their name alone."""
    changes = []
    for key, value in after.items():
        old = before.get(key)
        if old == value:
            continue
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            changes += [f"{key}.{change}" for change in changes_between(old, value)]
        elif isinstance(value, list | tuple) and isinstance(old, list | tuple) and len(old) > 4:
            changes.append(f"{key} {len(old)} entries -> {len(value)}")
        else:
            changes.append(f"{key} {old} -> {value}")
    return tuple(changes)


def _scale_part(settings: dict[str, Any]) -> int:
    """Scale one part in place; return how many settings counted layers."""
    before = dict(settings)
    num_found = _scale_layers(settings)
    for key, most in _AT_MOST.items():
        if _is_count(settings.get(key)):
            settings[key] = min(settings[key], most)
    width, smaller = _scale_widths(settings)
    for key in (*_WIDTHS, *_SAME_WIDTHS):
        if _is_count(before.get(key)) and before[key] == width:
            settings[key] = smaller
    for key in _INNER:
        if _is_count(settings.get(key)) and width:
            settings[key] = min(settings[key], _multiple(settings[key] * smaller / width, 8))
    if _is_count(settings.get("mamba_n_heads")) and _is_count(settings.get("mamba_expand")):
        head = settings["mamba_d_head"] = min(_HEAD_WIDTH, smaller)
        settings["mamba_n_heads"] = settings["mamba_expand"] * smaller // head
    if _is_count(settings.get("time_step_rank")):
        settings["time_step_rank"] = -(-smaller // 16)
    has_rotary = any(str(key).startswith("rope_") for key in settings)
    for key in () if has_rotary else _POSITIONS:
        if _is_count(settings.get(key)):
            settings[key] = min(settings[key], NUM_POSITIONS)
    return num_found


def _scale_layers(settings: dict[str, Any]) -> int:
    counts = {key: settings[key] for key in _LAYERS if _is_count(settings.get(key))}
    chosen: dict[int, list[int]] = {}
    for key, count in counts.items():
        by_layer = [
            value
            for name, value in settings.items()
            if isinstance(value, list) and len(value) == count
            if not _names_layers(name, value, count)
        ]
        chosen.setdefault(count, _layers_of_every_kind(count, by_layer))
        settings[key] = len(chosen[count])
    for name, value in list(settings.items()):
        if not isinstance(value, list) or not value:
            continue
        for count, kept in chosen.items():
            if _names_layers(name, value, count):
                settings[name] = [kept.index(layer) for layer in value if layer in kept]
                break
            if len(value) == count:
                settings[name] = [value[index] for index in kept]
                break
    most = max((len(kept) for kept in chosen.values()), default=0)
    if _is_count(settings.get("max_window_layers")) and counts:
        settings["max_window_layers"] = min(settings["max_window_layers"], most)
    return len(counts)


def _names_layers(name: str, value: list[Any], count: int) -> bool:
    """Whether a list names layers by their number: whole numbers that grow."""
    if not any(word in name for word in ("layer", "idx", "index")) or "token" in name:
        return False
    are_numbers = all(type(one) is int and 0 <= one < count for one in value)
    return are_numbers and value == sorted(set(value))


def _layers_of_every_kind(count: int, lists: list[list[Any]]) -> list[int]:
    """Layers to keep: one of every kind that a list by layer names, and at least three."""
    first: dict[str, int] = {}
    for index in range(count):
        first.setdefault(repr([values[index] for values in lists]), index)
    chosen = set(first.values()) if lists else set()
    for index in range(count):
        if len(chosen) >= min(count, NUM_LAYERS):
            break
        chosen.add(index)
    return sorted(chosen)


def _scale_widths(settings: dict[str, Any]) -> tuple[int, int]:
    """Scale heads in place; return the width of the model before and after."""
    width = next((settings[key] for key in _WIDTHS if _is_count(settings.get(key))), 0)
    heads = next((settings[key] for key in _HEADS if _is_count(settings.get(key))), 0)
    if not heads:
        return width, min(width, _WIDTH)
    groups_key = next((key for key in _KEY_VALUE_HEADS if _is_count(settings.get(key))), None)
    head_key = next((key for key in _HEAD_WIDTHS if _is_count(settings.get(key))), None)
    head_width = settings[head_key] if head_key is not None else max(1, width // heads)
    few = settings[groups_key] if groups_key is not None else heads
    key_values = min(few, _NUM_HEADS)
    smaller_heads = key_values * min(max(1, heads // few), 2)
    for key in _HEADS:
        if _is_count(settings.get(key)):
            settings[key] = min(settings[key], smaller_heads)
    if groups_key is not None:
        settings[groups_key] = key_values
    smaller_head = min(head_width, _HEAD_WIDTH)
    if "qk_rope_head_dim" in settings:
        settings["head_dim"] = settings["qk_rope_head_dim"]
        settings["qk_head_dim"] = settings["qk_rope_head_dim"] + settings["qk_nope_head_dim"]
        return width, min(width, _WIDTH)
    if head_key is not None:
        settings[head_key] = smaller_head
    if _is_count(settings.get("rotary_dim")):
        settings["rotary_dim"] = min(settings["rotary_dim"], smaller_head)
    _scale_rotary(settings, head_width, smaller_head)
    all_heads = smaller_heads * smaller_head
    if width == heads * head_width:
        return width, all_heads
    ratio = width / (heads * head_width)
    return width, min(width, max(_LEAST_WIDTH, _multiple(all_heads * ratio, 8)))


def _scale_rotary(settings: dict[str, Any], width: int, smaller: int) -> None:
    """Lists with a number per pair of a head's elements, or with their parts."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return
    scaled = dict(rope)
    for key, value in rope.items():
        if not isinstance(value, list):
            continue
        if key == "mrope_section" and sum(value) == width // 2:
            parts = [one * smaller // width for one in value]
            parts[-1] += smaller // 2 - sum(parts)
            scaled[key] = parts
        else:
            scaled[key] = value[: max(1, len(value) * smaller // width)]
    settings["rope_parameters" if "rope_parameters" in settings else "rope_scaling"] = scaled


def _scale_ids(settings: dict[str, Any]) -> None:
    """Shrink vocabularies, and bring ids of tokens inside them."""
    for key, value in settings.items():
        if "vocab_size" in key and _is_count(value):
            settings[key] = min(value, VOCABULARY)
    for key, value in settings.items():
        if not key.endswith(("token_id", "token_ids", "token_index")):
            continue
        if type(value) is int and value >= 0:  # -1 stands for none
            settings[key] = value % VOCABULARY
        elif isinstance(value, list):
            settings[key] = [one % VOCABULARY if type(one) is int else one for one in value]


def _even_parts(parts: list[int] | tuple[int, ...], total: int) -> list[int]:
    scaled = [max(2, part * total // sum(parts) // 2 * 2) for part in parts]
    scaled[-1] += total - sum(scaled)
    return scaled


def _multiple(number: float, of: int) -> int:
    return max(of, round(number / of) * of)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _not_scalable(why: str, names: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        "the model cannot be scaled down",
        why=why,
        remedy=f"give a configuration with such settings (known are {', '.join(names)}), or compare"
        " by hand: examples/training_loop.py shows how the engine is driven",
    )
