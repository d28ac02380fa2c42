"""Trains the Llama model of a folder in PyTorch on the CPU, in a process without JAX.

  python -m moddepth_jax.benchmarks.pytorch_steps FOLDER

Prints one line of JSON, like benchmarks/jax_steps.py.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch
import transformers

from moddepth_jax.host import peak_bytes


def train(folder: pathlib.Path) -> dict:
    """Train the model of config.json and model.safetensors as setting.json says."""
    setting = json.loads((folder / 'setting.json').read_text())
    inputs_BT, labels_BT = map(torch.from_numpy, np.load(folder / 'tokens.npy').astype(np.int64))
    load = transformers.LlamaForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation='sdpa').train()
    params = list(model.parameters())
    groups = [{'params': [param for param in params if param.ndim > 1]}]
    groups += [{'params': [param for param in params if param.ndim == 1], 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, **setting['adamw'], fused=True)
    seconds, losses = [], []
    for _ in range(setting['steps']):
        begin = time.perf_counter()
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, setting['clip_norm'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return {'seconds': seconds, 'losses': losses, 'peak_bytes': peak_bytes()}


if __name__ == '__main__':
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps(train(pathlib.Path(sys.argv[1]))))
