"""`docs/megatron-map.md` is true: the names of the trainer's pages, ours, and their tests."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "megatron-map.md").read_text()


def _names(text: str) -> list[str]:
    return re.findall(r"[\w.]+", text)


GENERATION = _names("""
maybe_configure_engine_reaping_env resolve_generation_class draft_full_refit_enabled
configure_generation_config TokenizerType
_inference_optimized_transformer_layer_spec _configure_inference_optimized_layer_spec
_resolve_mxfp8_refit_backend _http_sampling_defaults _resolve_coordinator_policy
_apply_optional_inference_config_kwargs _apply_inference_cuda_graph_scope
_gen_model _init_inference_engine_state _setup_colocated_cuda_graph_managers
get_inference_cuda_graph_capture_count _initialize_inference_engine _start_inference_coordinator
_run_async_coordinator_start _start_inference_loop_thread _sleep _sleep_engine _wake _wake_engine
_setup_openai_api_server report_dp_openai_server_base_url finish_generation prepare_for_generation
setup_token_capture set_rollout_weight_version _build_sampling_params _merge_stop_strings
_prepare_data_for_generation _parse_result_to_batched_data_dict generate generate_async
_generate_with_persistent_engine suspend_for_refit resume_after_refit
TQMegatronPromptPreparer TQMegatronPromptPreparer.prepare_prompt TQMegatronTokenStager
TQMegatronTokenStager.stage TQMegatronTokenStager.epoch_span_count _weight_version _stage_admitted
""")
"""What the pages name and generation needs, media and the transport of weights apart."""

MEDIA = _names("""
_get_megatron_inference_wrapper_cls _wrapper_supports_modality _inference_model_and_media_parts
_vision_pixel_dtype _build_image_preprocessing_config _sample_vision_tensors
_build_prompt_and_multimodal_data
""")


def rows() -> list[tuple[str, str, str]]:
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "name":
            found.append((cells[0].strip("`"), cells[1], cells[2]))
    return found


ROWS = rows()


def test_every_name_of_the_pages_is_listed_once() -> None:
    listed = [name for name, _, _ in ROWS]
    assert len(listed) == len(set(listed))
    assert set(GENERATION) | set(MEDIA) <= set(listed)
    assert "stub" not in PAGE.lower()


def test_only_media_is_planned_and_all_else_has_a_test() -> None:
    for name, here, test in ROWS:
        assert ("planned" in here) == (name in MEDIA), name
        assert bool(test) != (name in MEDIA), name


@pytest.mark.parametrize(("name", "here"), [(n, h) for n, h, _ in ROWS if "planned" not in h])
def test_what_a_row_names_is_there(name: str, here: str) -> None:
    path = re.search(r"`([\w.]+):([\w.]+)`", here)
    assert path is not None, name
    module, attributes = path.groups()
    if not module.startswith("tokenplane."):
        module = f"tokenplane.engine_adapter.{module}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a third party says as it is imported
        found = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)


def test_every_test_that_a_row_names_exists() -> None:
    known: dict[str, set[str]] = {}
    for name, _, tests in ROWS:
        for file, test in re.findall(r"`([\w./]+\.py)::(\w+)`", tests):
            if file not in known:
                tree = ast.parse((ROOT / "tests" / "dynamic" / file).read_text())
                known[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert test in known[file], f"{name}: {file} has no {test}"
        assert name in MEDIA or "::" in tests, name
