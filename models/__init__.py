"""A decoder-only transformer in Flax NNX on top of `pallas_flash`.

>>> import jax, jax.numpy as jnp
>>> config = ModelConfig(vocab_size=64, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2,
...                      head_dim=8, ffn_dim=64, max_seq_len=16)
>>> params = init_params(config, jax.random.key(0))
>>> apply(config, params, jnp.zeros((1, 16), jnp.int32)).shape
(1, 16, 64)
"""

from models.chunked_loss import chunked_next_token_loss, decoder_loss
from models.config import ModelConfig
from models.decoder import Decoder, Params, apply, bind, init_params
from models.loss import next_token_loss

__all__ = [
    "Decoder",
    "ModelConfig",
    "Params",
    "apply",
    "bind",
    "chunked_next_token_loss",
    "decoder_loss",
    "init_params",
    "next_token_loss",
]
