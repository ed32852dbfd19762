"""Named training runs. `python -m experiments.train NAME` starts one; any field can be set."""

from collections.abc import Callable
from dataclasses import replace

from experiments.training.config import DataConfig, ScheduleConfig, TrainConfig
from experiments.training.guard import GuardConfig
from experiments.training.optimizer import OptimizerConfig
from experiments.training.run_checkpoints import RetentionConfig
from experiments.training.spikes import RollbackConfig
from models.config import ModelConfig
from models.presets import gpt2_124m, llama3_2_1b


def tiny() -> TrainConfig:
    """A minute on two CPU cores: a byte-level model of 0.1 M parameters on the sample corpus."""
    model = ModelConfig(
        vocab_size=256,
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_dim=176,
        max_seq_len=256,
        qk_norm=True,
        z_loss=1e-5,
        compute_dtype="float32",
    )
    return TrainConfig(
        model=model,
        out="runs/tiny",
        batch_size=16,
        seq_len=128,
        schedule=ScheduleConfig(peak=1e-2, total_steps=400, warmup_steps=20),
        checkpoint=RetentionConfig(every=50),
    )


def gpt2_124m_4k() -> TrainConfig:
    """124 M parameters on the corpus of `make corpus` with a 32k BPE: 200 M tokens, cosine."""
    model = replace(
        gpt2_124m(), vocab_size=32_768, max_seq_len=2048, qk_norm=True, z_loss=1e-5, remat="none"
    )
    return TrainConfig(
        model=model,
        out="runs/gpt2-124m",
        batch_size=64,
        seq_len=2048,
        accumulation=4,
        data=DataConfig(corpus="corpus", vocab_size=32_768),
        schedule=ScheduleConfig(peak=1e-3, total_steps=1600, warmup_steps=160),
        optimizer=OptimizerConfig(beta2=0.95),
        checkpoint=RetentionConfig(every=200),
    )


def gpt2_124m_wsd() -> TrainConfig:
    """The same with a stable rate and a 1 - sqrt cooldown over the last fifth, to branch from."""
    base = gpt2_124m_4k()
    return replace(
        base,
        out="runs/gpt2-124m-wsd",
        schedule=replace(base.schedule, cooldown_steps=320, shape="1-sqrt", final=0.0),
        checkpoint=RetentionConfig(every=160, keep_every=320),
    )


def gpt2_124m_muon() -> TrainConfig:
    """The same with Muon for the matrices of the blocks."""
    base = gpt2_124m_4k()
    return replace(
        base, out="runs/gpt2-124m-muon", optimizer=OptimizerConfig(name="muon", beta2=0.95)
    )


def llama_1b() -> TrainConfig:
    """The shape of Llama-3.2-1B at 8k; bring data of your own vocabulary (`--data.corpus`)."""
    # 8k is the length before Llama-3.2's extension: trained from scratch, RoPE is not scaled.
    shape = replace(llama3_2_1b(), max_seq_len=8192, rope_scaling=None)
    return TrainConfig(
        model=replace(shape, z_loss=1e-5, remat="attention"),
        out="runs/llama-1b",
        batch_size=64,
        seq_len=8192,
        accumulation=32,
        data=DataConfig(corpus="corpus", vocab_size=32_768),
        schedule=ScheduleConfig(peak=5e-4, total_steps=20_000, warmup_steps=1_000),
        optimizer=OptimizerConfig(beta2=0.95),
        guard=GuardConfig(),
        rollback=RollbackConfig(),
        checkpoint=RetentionConfig(every=500),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "tiny": tiny,
    "gpt2-124m": gpt2_124m_4k,
    "gpt2-124m-wsd": gpt2_124m_wsd,
    "gpt2-124m-muon": gpt2_124m_muon,
    "llama-1b": llama_1b,
}
