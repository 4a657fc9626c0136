"""Parts of the Megatron engine in one process, against mbridge, transformers and Megatron-Core."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engines import collectives
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.errors import CheckpointError, EngineError
from engines.training.backends.megatron.engine import MegatronEngine
from engines.training.spec import EngineSpec
from engines.types import GlobalCounts, LossOutput, ModelOutputs, TokenBatch
from hardware.cpu import CPUPlatform
from hardware.cpu_megatron import megatron_on_cpu
from infra.errors import ConfigError

MakeModel = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    collectives.close_process_group()


def make_engine(path: Path, *, load: bool = True, **training: Any) -> MegatronEngine:
    config = TrainingConfig(backend="megatron", **training)
    engine = MegatronEngine(EngineSpec(path, config, OptimizerConfig(), 10, CPUPlatform(), 0))
    engine.initialize(load_weights=load)
    return engine


def loss_fn(outputs: ModelOutputs, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
    return LossOutput(-(outputs.logprobs_T * batch.columns["loss_mask"]).sum() / counts.num_tokens)


BATCH = TokenBatch.from_sequences(
    [[3, 4, 5, 6], [7, 8, 9]], loss_mask=[[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
)


# What makes it run on a CPU.


def test_nothing_is_left_of_the_scope() -> None:
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    compiler = torch.compile
    with megatron_on_cpu(), megatron_on_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"
        assert torch.zeros(1).to("cuda:0").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.compile(len) is len
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == before
    assert torch.compile is compiler
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_the_scope_ends_with_an_error() -> None:
    before = torch.cuda.current_device
    with pytest.raises(ZeroDivisionError), megatron_on_cpu():
        raise ZeroDivisionError
    assert torch.cuda.current_device is before


# Bugs of Megatron-Core on machines without TransformerEngine.


def test_weights_that_the_architecture_lacks_are_refused(qwen3_dir: Path, tmp_path: Path) -> None:
    hf_dir = tmp_path / "scaled"
    shutil.copytree(qwen3_dir, hf_dir)
    name = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file({name: torch.ones(1, 1)}, hf_dir / "scales.safetensors")
    with pytest.raises(ConfigError, match=rf"^model\.path: .*'unexpected': \['{name}'\]"):
        make_engine(hf_dir)


def test_routers_need_a_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with megatron_on_cpu():
        from megatron.core.transformer.moe import moe_utils

        from engines.training.backends.megatron.replica import define_missing_names

        args = (torch.ones(2, 3), torch.ones(4, 3), None, torch.float32)
        monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
        with pytest.raises(NameError, match="te_general_gemm"):
            moe_utils.router_gating_linear(*args)
        define_missing_names()
        assert moe_utils.router_gating_linear(*args).tolist() == [[3.0] * 4] * 2


def test_loading_by_their_own_methods_fails(qwen3_dir: Path) -> None:
    """They ask for the step counter among tensors that, as documented, do not have it."""
    engine = make_engine(qwen3_dir)
    engine.train_batch(BATCH, loss_fn)
    with megatron_on_cpu():
        theirs = engine.replica.optimizer._parts[0]
        parameter = next(engine.replica.chunks[0].parameters())
        tensors = theirs._get_main_param_and_optimizer_states(parameter)
        del tensors["step"]
        with pytest.raises(KeyError, match="step"):
            theirs._set_main_param_and_optimizer_states(parameter, tensors)


def test_loading_by_their_own_methods_shares_the_counter(qwen3_dir: Path) -> None:
    engine = make_engine(qwen3_dir)
    engine.train_batch(BATCH, loss_fn)
    with megatron_on_cpu():
        theirs = engine.replica.optimizer._parts[0]
        for group in theirs.optimizer.param_groups:  # by which they tell groups apart
            group |= {"lr_mult": 1.0, "wd_mult": float(group["weight_decay"] > 0)}
            group |= {"is_expert_parallel": False, "is_decoupled_lr": False}
        theirs.load_state_dict(theirs.state_dict())
    states = list(theirs.optimizer.state.values())
    assert len(states) > 10
    assert len({id(state["step"]) for state in states}) == 1, "mended upstream"


def test_each_parameter_counts_its_own_steps_after_a_resume(
    qwen3_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine(qwen3_dir)
    for _ in range(3):
        engine.train_batch(BATCH, loss_fn)
    engine.save_checkpoint(tmp_path, step=3)
    resumed = make_engine(qwen3_dir, load=False)
    resumed.load_checkpoint(tmp_path)
    resumed.train_batch(BATCH, loss_fn)
    optimizer = resumed.replica.optimizer
    assert optimizer is not None
    states = [shard.state["step"] for shard in optimizer.shards.values()]
    assert len({step.data_ptr() for step in states}) == len(states) > 10
    assert {float(step) for step in states} == {4.0}


# Blocks of weights.


class Chunk(nn.Module):
    """Parameters of one tensor-parallel rank, without a model around them."""

    share_embeddings_and_output_weights = False

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, shape in self.shapes.items():
            yield name, nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_are_where_mbridge_puts_them(make_model: MakeModel, rank: int) -> None:
    """Its conversion and cut of whole weights is a second implementation of the same thing."""
    path = make_model("qwen2", tie_word_embeddings=False, vocab_size=38)
    make_engine(path)  # process groups, which mbridge asks for
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    with megatron_on_cpu():
        from engines.training.backends.megatron.layout import Layout
        from engines.training.backends.megatron.model import Architecture
        from engines.training.backends.megatron.parallel import Place
        from engines.training.backends.megatron.param_mapping import parts_of

        config = AutoConfig.from_pretrained(path)
        architecture = Architecture(config, Layout(), torch.float32)
        place: Any = Place(rank, 0, 0, 0, *(None,) * 6)  # pyright: ignore[reportArgumentType]
        shapes: dict[str, tuple[int, ...]] = {
            "embedding.word_embeddings.weight": (19, 32),
            "decoder.layers.1.self_attention.linear_qkv.weight": (32, 32),
            "decoder.layers.1.self_attention.linear_qkv.bias": (32,),
            "decoder.layers.1.self_attention.linear_proj.weight": (32, 16),
            "decoder.layers.1.mlp.linear_fc1.weight": (48, 32),
            "decoder.layers.1.mlp.linear_fc2.weight": (32, 24),
            "decoder.layers.1.input_layernorm.weight": (32,),
            "decoder.layers.1.pre_mlp_layernorm.weight": (32,),
            "decoder.final_layernorm.weight": (32,),
            "output_layer.weight": (19, 32),
        }
        parts = parts_of([Chunk(shapes)], architecture, Layout(tensor=2), place)
        assert [part.name for part in parts] == list(shapes)
        bridge = architecture._bridge
        for part in parts:
            whole = [weights[name] for name in architecture.hub_names(part.name)]
            converted = bridge._weight_to_mcore_format(part.name, whole)
            local = torch.empty(shapes[part.name])
            theirs = bridge._weight_split_across_tp(part.name, converted, local, 2)[rank]
            ours = local.fill_(torch.nan)
            for block in part.hub:
                place_in_whole = tuple(
                    slice(o, o + n) for o, n in zip(block.offsets, block.shape, strict=True)
                )
                block.write(ours, weights[block.name][place_in_whole])
                assert torch.equal(block.read(ours), weights[block.name][place_in_whole])
                assert block.whole == tuple(weights[block.name].shape)
            assert torch.equal(ours, theirs), part.name


# What is refused.


def test_a_missing_weight_is_named(make_model: MakeModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_model("llama", tie_word_embeddings=False)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"has no weight {name}"):
        make_engine(tmp_path)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} has shape"):
        make_engine(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(
    make_model: MakeModel, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_engine(qwen3_dir).save_checkpoint(tmp_path, step=1)
    wider = make_model("qwen3", tie_word_embeddings=True, intermediate_size=64)
    with pytest.raises(CheckpointError, match="gate_proj.weight has shape"):
        make_engine(wider, load=False).load_checkpoint(tmp_path)
    deeper = make_model("qwen3", tie_word_embeddings=True, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="holds no"):
        make_engine(deeper, load=False).load_checkpoint(tmp_path)


def test_adapters_that_it_has_not_are_refused(qwen3_dir: Path) -> None:
    with pytest.raises(ConfigError, match="training.lora.use_dora: got true; megatron has no DoRA"):
        make_engine(qwen3_dir, lora={"rank": 2, "use_dora": True})
    with pytest.raises(ConfigError, match="transformer_engine: got true with training.lora; need"):
        make_engine(qwen3_dir, lora={"rank": 2}, options={"transformer_engine": True})
    with pytest.raises(ConfigError, match="training.lora.target_modules: got q; need some of"):
        make_engine(qwen3_dir, lora={"rank": 2, "target_modules": ("q",)})


def test_an_engine_that_was_not_initialized_says_so(qwen3_dir: Path) -> None:
    spec = EngineSpec(qwen3_dir, TrainingConfig(backend="megatron"), None, 1, CPUPlatform(), 0)
    with pytest.raises(EngineError, match="call initialize"):
        _ = MegatronEngine(spec).data_parallel_group
