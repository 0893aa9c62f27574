"""From a folder to an engine: what is read from it, what is refused and in which words."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from common.config import WorkerConfig
from common.errors import ConfigError, ModelError
from common.params import SamplingParams
from tests.support.tiny_models import VOCAB_SIZE, answers, prompt_of, reference_tokens, tiny_model
from worker.assemble import build_engine
from worker.model_loader import choose_arithmetic, choose_device, load_model
from worker.models.resolve import ResolvedModel
from worker.probe import probe

CONFIG = WorkerConfig(num_blocks=64, block_size=8, quantization="none", device="cpu", threads=1)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny Llama as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def build(folder: Path, config: WorkerConfig = CONFIG):
    return build_engine(config, ResolvedModel(folder.name, folder), lambda line: None)


def test_a_saved_model_generates_what_transformers_does(saved):
    engine, info = build(saved)
    prompt = prompt_of(30, seed=1)
    [answer] = answers(engine, [prompt], 20, GREEDY)
    assert answer.tokens == reference_tokens(tiny_model("llama"), prompt, 20)
    assert (info.id, info.path, info.vocab_size) == ("tiny-llama", str(saved), VOCAB_SIZE)
    assert info.max_model_len == 64 * 8  # also the model's own


def test_auto_on_the_cpu_is_float32_packed_as_fp16_where_int8_cannot_be_judged(saved, tmp_path):
    """The folder has no tokenizer."""
    _, info = build(saved, replace(CONFIG, quantization="auto", cache_dir=str(tmp_path)))
    assert info.details["dtype"] == "float32"
    assert info.details["quantization"] == "fp16"
    assert info.details["attn_implementation"] == "paged_torch"


def test_sizes_are_inferred_and_can_be_given(saved):
    _, info = build(saved, replace(CONFIG, num_blocks=None, max_batch_size=3))
    assert info.details["num_blocks"] == 3 * 512 // 8
    assert info.details["max_batch_tokens"] == 128
    engine, info = build(saved, replace(CONFIG, max_batch_tokens=40, max_model_len=100, continuous_batching=False))
    assert info.details["max_batch_tokens"] == 40
    assert info.details["max_batch_size"] == 1
    assert info.max_model_len == engine.max_model_len == 100


def test_a_cache_smaller_than_the_context_bounds_what_is_announced(saved):
    _, info = build(saved, replace(CONFIG, num_blocks=10))
    assert info.max_model_len == 80


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [(5, None, [5]), ([5, 6], None, [5, 6]), (5, [7, 8], [7, 8]), (5, 9, [9]), (None, None, [])],
)
def test_end_of_sequence_ids(folder, in_config, in_generation_config, expected):
    """generation_config.json wins: that is where chat models list the end of a turn."""
    change(folder / "config.json", eos_token_id=in_config)
    if in_generation_config is None:
        (folder / "generation_config.json").unlink()
    else:
        change(folder / "generation_config.json", eos_token_id=in_generation_config)
    _, info = build(folder)
    assert info.eos_token_ids == expected


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("attn_implementation", {"attn_implementation": "sdpa"}),
        ("device", {"device": "tpu"}),
        ("device", {"device": "meta"}),
        ("device", {"device": "cuda:99"}),
        ("quantization", {"quantization": "fp16", "dtype": "bfloat16"}),
        ("max_model_len", {"max_model_len": 513}),
        ("num_blocks", {"num_blocks": 10**12}),
        ("num_blocks", {"num_blocks": 1, "block_size": 1}),
        ("max_model_len", {"num_blocks": 4, "max_model_len": 100}),
    ],
)
def test_settings_that_do_not_work_here_are_named(saved, key, setting):
    with pytest.raises(ConfigError) as caught:
        build(saved, replace(CONFIG, **setting))
    assert caught.value.key == key


def test_quantization_is_for_the_cpu():
    cuda = torch.device("cuda")
    assert choose_arithmetic(WorkerConfig(), cuda) == ("bfloat16", "none")
    with pytest.raises(ConfigError, match="quantization"):
        choose_arithmetic(WorkerConfig(quantization="int8"), cuda)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_the_cpu(saved, dtype):
    """Without quantization the model runs in the type that was asked for."""
    loaded = load_model(saved, replace(CONFIG, quantization="auto", dtype=dtype))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
    engine, _ = build(saved, replace(CONFIG, quantization="auto", dtype=dtype))
    [answer] = answers(engine, [prompt_of(20, seed=2)], 8, GREEDY)
    assert len(answer.tokens) == 8


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        build(tmp_path)


def test_a_broken_config(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no-such-model"):
        build(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        build(folder)


def test_pickled_weights_are_refused(folder):
    """A pickle can run code: it is not even opened unless a setting allows it."""
    weights = folder / "model.safetensors"
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        build(folder)


def test_a_models_own_code_is_not_run(folder):
    """A folder that brings Python code is refused, and the code leaves no trace."""
    trace = folder / "trace"
    (folder / "configuration_mine.py").write_text(f"open({str(trace)!r}, 'w')\nclass Mine: pass\n")
    change(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"})
    with pytest.raises(ModelError):
        build(folder)
    assert not trace.exists()


def save(tmp_path: Path, config: transformers.PreTrainedConfig, cls=transformers.AutoModelForCausalLM) -> Path:
    cls.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


SMALL = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_encoder_decoder_models_are_refused(tmp_path):
    config = transformers.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="encoder"):
        build(save(tmp_path, config, transformers.AutoModelForSeq2SeqLM))


REFUSED = [
    (transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8), "linear_attention"),
    (transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=2), "context length"),
    (transformers.MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=2), "does not work with"),
    (
        transformers.FalconH1Config(**SMALL, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8),
        "hybrid",
    ),
    (transformers.Lfm2Config(**SMALL, num_key_value_heads=2, layer_types=["conv", "full_attention"]), "conv"),
    (
        transformers.RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
        "0 of 2 layers",
    ),
    (transformers.StableLmConfig(**SMALL, num_key_value_heads=2), "keyword arguments"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[config.model_type for config, _ in REFUSED])
def test_models_that_would_be_served_wrongly_are_refused(tmp_path, config, said):
    """Recurrences, convolutions and masks of a model's own would be silently wrong in a packed step."""
    with pytest.raises(ModelError, match=said):
        build(save(tmp_path, config))


def test_a_model_with_a_memory_of_its_own_is_found_out(saved):
    """A convolution over the packed row, as some families have beside attention: right in one piece, wrong in parts."""
    loaded = load_model(saved, CONFIG)
    assert probe(loaded, 8) == 3 * 2 * (16 + 16) * 4
    loaded.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    with pytest.raises(ModelError, match="in parts"):
        probe(loaded, 8)


def test_a_window_that_attention_is_not_told_of_is_found_out(saved):
    """Families that put the window into the mask alone would see too far."""
    loaded = load_model(saved, CONFIG)
    with pytest.raises(ModelError, match="window"):
        probe(replace(loaded, layer_types=("full_attention", "sliding_attention", "full_attention")), 8)
    with pytest.raises(ModelError, match="window"):
        probe(replace(loaded, window=100), 8)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoXConfig(**SMALL),
        transformers.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=16),
        transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=3),
        transformers.OlmoConfig(**SMALL),
        transformers.Starcoder2Config(**SMALL, num_key_value_heads=1, sliding_window=None),
        transformers.GraniteConfig(**SMALL, num_key_value_heads=1),
        transformers.CohereConfig(**SMALL, num_key_value_heads=1),
        transformers.SmolLM3Config(**SMALL, num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=1),
        transformers.DeepseekV3Config(
            **SMALL,
            num_key_value_heads=2,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_more_families_pass_the_probe_and_match_transformers(tmp_path, config):
    """Families beside those of test_greedy.py, one with keys and values of different sizes."""
    config.initializer_range = 0.2
    folder = save(tmp_path, config)
    engine, _ = build(folder)
    prompt = [7, 3, 90, 41, 5, 66, 12, 8, 9, 77, 31]
    [answer] = answers(engine, [prompt], 10, GREEDY)
    assert answer.tokens == reference_tokens(transformers.AutoModelForCausalLM.from_pretrained(folder), prompt, 10)
