"""megatron-core: a GPT with tensor and pipeline parallelism, on CPUs.

Arguments: tensor-parallel size, pipeline-parallel size.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

SEQUENCE, VOCAB, MICROBATCHES = 16, 64, 2


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def forward(model, tokens, labels):
    position_ids = torch.arange(SEQUENCE).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    return model(tokens, position_ids, mask, labels=labels)


def train_step(model, messages, data, shape):
    """GPipe's schedule: all microbatches forward, then all back."""
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    held, losses = [], []
    for _ in range(MICROBATCHES):
        tokens, labels = next(data)
        received = messages.recv_forward(shape, first)
        if not first:
            received.requires_grad_()
            model.set_input_tensor(received)
        output = forward(model, tokens, labels)
        messages.send_forward(output, last)
        held.append((received, output))
    for received, output in held:
        gradient = messages.recv_backward(shape, last)
        if last:
            loss = output.float().mean() / MICROBATCHES
            losses.append(loss.item())
            loss.backward()
        else:
            output.backward(gradient)
        messages.send_backward(None if first else received.grad, first)
    return sum(losses)


def main():
    tp, pp = (int(value) for value in (sys.argv[1:3] or (1, 1)))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(123)
    initialize_rng_tracker(inference_rng_tracker=True)  # no dropout: no generators on a GPU to fork
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = parallel_state.get_data_parallel_group()
    data = batches(parallel_state.get_data_parallel_rank())
    messages = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)
    for step in range(3):
        optimizer.zero_grad()
        loss = train_step(model, messages, data, (SEQUENCE, 2, config.hidden_size))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size()
        optimizer.step()
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            print(f"rank {rank} step {step}: loss {loss:.4f}")
    weights = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    place = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    print(f"rank {rank} at {place}, data {parallel_state.get_data_parallel_rank()}: {weights:.3f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.cuda.current_device = lambda: torch.device("cpu")  # its messages are received there
    main()
