"""The generation configuration: refused keys, routing policy, options, graphs, layers, reaping."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.inference.config import InferenceConfig

from tests.dynamic.dynamic_engines import fresh_model
from tokenplane.engine_adapter.cpu.megatron_cpu_shim import importable_bridge
from tokenplane.engine_adapter.worker import generation_layers
from tokenplane.engine_adapter.worker.generation import MegatronGenerationWorker
from tokenplane.engine_adapter.worker.generation_config import parse_generation_config
from tokenplane.engine_adapter.worker.generation_engine import (
    OPTIONAL,
    apply_optional_inference_config_kwargs,
    http_sampling_defaults,
    resolve_coordinator_policy,
    to_dynamic_settings,
    to_megatron_extra,
)
from tokenplane.engine_adapter.worker.generation_layers import (
    configure_inference_optimized_layer_spec,
    inference_optimized_transformer_layer_spec,
    resolve_mxfp8_refit_backend,
)
from tokenplane.engine_adapter.worker.generation_setup import (
    REAPING_VARIABLE,
    configure_generation_config,
    draft_full_refit_enabled,
    maybe_configure_engine_reaping_env,
    resolve_generation_class,
)
from tokenplane.schemas.errors import ConfigError

pytestmark = pytest.mark.engine


def config_of(**megatron: Any) -> Any:
    return parse_generation_config({"megatron": megatron})


def test_a_refusal_shows_what_came_but_no_value_of_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens: .* got '64'; key 'max_new_tokens'"):
        parse_generation_config({"max_new_tokens": "64"})
    with pytest.raises(ConfigError) as refusal:
        parse_generation_config({"api_key": "hunter2"})
    assert refusal.value.key == "api_key"
    assert "hunter2" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"^Input should be a valid dictionary .*got \[\]$"):
        parse_generation_config([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"megatron": {"buffer_gb": 1}}, "megatron.buffer_gb"),
        ({"top_p": 0}, "top_p"),
        ({"megatron": {"prefix_caching_coordinator_policy": "round_robin"}}, "policy"),
        ({"backend": "vllm"}, "backend"),
        ({"max_new_tokens": "64"}, "max_new_tokens"),
        ({"colocated": 1}, "colocated"),
        ({"stop_token_ids": ["7"]}, "stop_token_ids"),
        ({"megatron": {"expose_http_server": "yes"}}, "expose_http_server"),
        ({"temperature": float("inf")}, "temperature: .* got inf"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s"),
        ({"start_timeout_s": 1e12}, "start_timeout_s"),
        (
            {
                "megatron": {
                    "keep_prefix_cache_after_weight_updates": True,
                    "enable_chunked_prefill": True,
                }
            },
            "megatron: .*keep_prefix_cache_after_weight_updates with enable_chunked_prefill",
        ),
    ],
)
def test_unknown_keys_and_values_are_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_generation_config(values)


def test_the_routing_policy_is_resolved_once_for_engine_and_frontends() -> None:
    assert resolve_coordinator_policy(config_of().megatron) == "load_balanced"
    cached = config_of(enable_prefix_caching=True)
    assert resolve_coordinator_policy(cached.megatron) == "first_prefix_block"
    longest = config_of(
        enable_prefix_caching=True, prefix_caching_coordinator_policy="longest_prefix"
    )
    extra = to_megatron_extra(longest)
    assert extra["prefix_caching_coordinator_policy"].value == "longest_prefix"
    with pytest.raises(ConfigError, match="needs prefix caching"):
        resolve_coordinator_policy(
            config_of(prefix_caching_coordinator_policy="longest_prefix").megatron
        )


GIVEN: dict[str, Any] = {
    "prefix_caching_routing_alpha": 0.25,
    "use_flashinfer_fused_rope": True,
    "cuda_graph_mixed_prefill_count": 3,
    "cuda_graph_max_tokens": 64,
    "cuda_graph_all_prefills": True,
    "cuda_graph_sizing_distribution": "linear",
    "use_cuda_graphs_for_non_decode_steps": False,
    "static_kv_memory_pointers": True,
    "unified_memory_level": 1,
    "use_synchronous_zmq_collectives": True,
}
"""Another value than Megatron's default, for each option."""


def test_only_options_that_are_set_are_forwarded() -> None:
    kwargs: dict[str, Any] = {"max_requests": 4}
    apply_optional_inference_config_kwargs(kwargs, config_of().megatron)
    assert kwargs == {"max_requests": 4}
    given = config_of(prefix_caching_routing_alpha=0.25, cuda_graph_max_tokens=64)
    apply_optional_inference_config_kwargs(kwargs, given.megatron)
    assert kwargs == {
        "max_requests": 4,
        "prefix_caching_routing_alpha": 0.25,
        "cuda_graph_max_tokens": 64,
    }


@pytest.mark.parametrize("name", OPTIONAL)
def test_each_option_reaches_megatron_in_its_type_and_a_wrong_type_is_refused(name: str) -> None:
    plain, config = InferenceConfig(), config_of(**{name: GIVEN[name]})
    made = InferenceConfig(**to_megatron_extra(config))
    value, default = getattr(made, name), getattr(plain, name)
    assert (value.value if isinstance(value, Enum) else value) == GIVEN[name]
    assert value != default
    assert isinstance(value, type(default))
    wrong = "1" if isinstance(GIVEN[name], bool | int | float) else 1
    with pytest.raises(ConfigError, match=name):
        config_of(**{name: wrong})
    for other in (0, 1) if isinstance(GIVEN[name], bool) else (True,):
        with pytest.raises(ConfigError, match=name):
            config_of(**{name: other})


def test_options_reach_the_running_engine() -> None:
    config = parse_generation_config(
        {
            "megatron": {
                "max_sequence_length": 64,
                "block_size_tokens": 16,
                "use_coordinator": False,
                "enable_prefix_caching": True,
                "prefix_caching_coordinator_policy": "longest_prefix",
                "prefix_caching_routing_alpha": 0.25,
                "cuda_graph_max_tokens": 64,
            }
        }
    )
    worker = MegatronGenerationWorker(fresh_model("tiny"), config)
    worker.prepare_for_generation()
    loop: Any = worker.engine._loop if worker.engine else None
    context = loop.core.context
    try:
        assert context.prefix_caching_routing_alpha == 0.25
        assert context.prefix_caching_coordinator_policy.value == "longest_prefix"
        assert context.config.cuda_graph_max_tokens == 64
    finally:
        worker.shutdown()


def test_http_defaults_are_the_configured_sampling() -> None:
    given = parse_generation_config({"temperature": 0.6, "top_p": 0.9, "top_k": 40})
    assert http_sampling_defaults(given) == {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    assert http_sampling_defaults(config_of())["top_k"] == 0


def test_settings_follow_the_configuration() -> None:
    settings = to_dynamic_settings(
        config_of(
            buffer_size_gb=0.5,
            block_size_tokens=16,
            enable_prefix_caching=True,
            keep_prefix_cache_after_weight_updates=True,
        )
    )
    assert settings.max_kv_bytes == 2**29
    assert settings.block_tokens == 16
    assert settings.reason == "legacy scheduling, prefix cache kept at refit"


TOKENIZER = SimpleNamespace(eos_token_id=7, pad_token_id=None)


def test_configuring_fills_in_the_tokenizers_ids() -> None:
    done = configure_generation_config(config_of(), TOKENIZER)
    assert done.stop_token_ids == (7,)
    assert done.pad_token_id == 7
    kept = configure_generation_config(
        parse_generation_config({"stop_token_ids": [1, 2], "pad_token_id": 0}), TOKENIZER
    )
    assert kept.stop_token_ids == (1, 2)
    assert kept.pad_token_id == 0
    with pytest.raises(ConfigError, match="no end of sequence"):
        configure_generation_config(
            config_of(), SimpleNamespace(eos_token_id=None, pad_token_id=None)
        )


@pytest.mark.parametrize(
    ("speculative", "flags", "expected"),
    [
        (False, {}, "placeholder"),
        (False, {"is_eval": True}, "real"),
        (True, {}, "real"),
        (True, {"has_refit_draft_weights": True}, "real"),
        (True, {"has_refit_draft_weights": True, "trains_mtp": True}, "placeholder"),
        (True, {"has_refit_draft_weights": True, "draft_full_refit": True}, "placeholder"),
        (True, {"trains_mtp": True}, "real"),
    ],
)
def test_weights_are_real_unless_the_first_refit_brings_them_all(
    speculative: bool, flags: dict[str, bool], expected: str
) -> None:
    config = parse_generation_config({"speculative_decoding": speculative})
    assert configure_generation_config(config, TOKENIZER, **flags).load_weights == expected


def test_draft_full_refit() -> None:
    both = {"automodel_cfg": {"enabled": True}, "draft": {"enabled": True}}
    assert draft_full_refit_enabled(both)
    assert not draft_full_refit_enabled(both | {"automodel_cfg": {"enabled": False}})
    assert not draft_full_refit_enabled({"draft": {"enabled": True}})
    assert not draft_full_refit_enabled({"automodel_cfg": {"enabled": True}, "draft": None})
    with pytest.raises(ConfigError, match="without draft weights"):
        configure_generation_config(config_of(), TOKENIZER, draft_full_refit=True)


def test_the_worker_class_of_a_backend() -> None:
    assert resolve_generation_class(config_of()) is MegatronGenerationWorker
    with pytest.raises(ConfigError, match="no such generation backend"):
        resolve_generation_class({"backend": "vllm"})


def test_reaping_is_set_once_and_an_operators_choice_stays() -> None:
    environ: dict[str, str] = {}
    maybe_configure_engine_reaping_env(False, environ)
    assert environ == {}
    maybe_configure_engine_reaping_env(True, environ)
    assert environ == {REAPING_VARIABLE: "1"}
    chosen = {REAPING_VARIABLE: "0"}
    maybe_configure_engine_reaping_env(True, chosen)
    assert chosen == {REAPING_VARIABLE: "0"}


@pytest.mark.parametrize(("backend", "storage"), [("torch", "triton"), ("flashinfer",) * 2])
def test_mxfp8_storage(backend: str, storage: str) -> None:
    model = SimpleNamespace(inference_grouped_gemm_backend=backend)
    assert resolve_mxfp8_refit_backend(model) == storage


def test_mxfp8_is_refused_where_the_backend_knows_bf16_only() -> None:
    with pytest.raises(ConfigError, match="no MXFP8 storage"):
        resolve_mxfp8_refit_backend(SimpleNamespace(inference_grouped_gemm_backend="vllm"))


@pytest.mark.slow
def test_inference_layers_only_for_the_generic_provider_with_its_default_spec() -> None:
    with importable_bridge():
        from megatron.bridge.models.gpt_provider import GPTModelProvider

    def provider(impl: str) -> Any:
        made = GPTModelProvider(num_layers=1, hidden_size=64, num_attention_heads=4)
        made.transformer_impl = impl
        return made

    generic = provider("inference_optimized")
    configure_inference_optimized_layer_spec(generic)
    assert generic.transformer_layer_spec is inference_optimized_transformer_layer_spec

    plain = provider("transformer_engine")
    before = plain.transformer_layer_spec
    configure_inference_optimized_layer_spec(plain)
    assert plain.transformer_layer_spec is before

    own = provider("inference_optimized")
    own.transformer_layer_spec = lambda config: None
    before = own.transformer_layer_spec
    configure_inference_optimized_layer_spec(own)
    assert own.transformer_layer_spec is before

    hybrid = SimpleNamespace(
        transformer_impl="inference_optimized", transformer_layer_spec="its own"
    )
    configure_inference_optimized_layer_spec(hybrid)
    assert hybrid.transformer_layer_spec == "its own"


def test_the_inference_layer_spec_needs_transformer_engine() -> None:
    config = SimpleNamespace(
        qk_layernorm=False,
        multi_latent_attention=False,
        qk_l2_norm=False,
        num_moe_experts=None,
        moe_grouped_gemm=False,
    )
    with pytest.raises(AssertionError, match="requires transformer engine"):
        generation_layers.inference_optimized_transformer_layer_spec(config)
