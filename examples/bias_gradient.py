"""Learn an additive bias through attention: from outputs alone, recover the distance penalty that made them.

Run ``python examples/bias_gradient.py``; takes seconds on a CPU. ``--plot FILE`` draws the learned bias and its last gradient.
"""

import argparse

import torch

from dmattn import attention


def recover(steps: int = 150) -> tuple[float, float, torch.Tensor]:
    """Error of the bias before and after training, as the largest difference in attention weight; and the bias, with its last gradient."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, heads, kv_heads, length, head_dim = 16, 4, 2, 64, 32
    query = torch.randn(batch, heads, length, head_dim, device=device)
    key, value = torch.randn(2, batch, kv_heads, length, head_dim, device=device)

    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    true_bias = (-slopes[:, None, None] * distance).to(device)  # (H, Sq, Sk), as ALiBi has it
    target = attention(query, key, value, bias=true_bias, causal=True)

    bias = torch.zeros(heads, length, length, device=device, requires_grad=True)  # shared by the batch: its gradient is summed over it
    optimizer = torch.optim.Adam([bias], lr=0.1)
    before = weight_error(bias, true_bias)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (attention(query, key, value, bias=bias, causal=True) - target).square().mean()
        loss.backward()
        optimizer.step()
    return before, weight_error(bias, true_bias), bias


def weight_error(bias: torch.Tensor, true_bias: torch.Tensor) -> float:
    """Largest difference of the causal attention weights that the two biases give where query and key are orthogonal."""
    hidden = torch.ones_like(bias, dtype=torch.bool).triu(1)
    weights, true_weights = (x.detach().masked_fill(hidden, float("-inf")).softmax(-1) for x in (bias, true_bias))
    return (weights - true_weights).abs().max().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Recover an additive bias from the outputs of attention alone, by its gradient.")
    parser.add_argument("--steps", type=int, default=150, help="of training (%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="draw the learned bias of the first head, and its last gradient (needs matplotlib)")
    options = parser.parse_args()
    before, after, learned = recover(options.steps)
    print(f"largest error in an attention weight: {before:.3f} with no bias, {after:.3f} with the learned one")
    if options.plot:
        from dmattn import plot

        plot.bias_and_gradient(learned)[0].figure.savefig(options.plot)
