"""The optimizer: master weights, decay, clipping, save and restore, the learning rate's course."""

import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from grpo.errors import UserError
from grpo.optimizer import build_optimizer, learning_rate_at

KINDS = ["adamw", "adamw_8bit", "paged_adamw_8bit"]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def make(kind="adamw", dtype=torch.float32, seed=0, **settings):
    """A matrix large enough for 8-bit states (4,096 elements), a small one, a vector."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.weight": (64, 80), "head.weight": (3, 5), "norm.weight": (80,)}
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }
    return parameters, build_optimizer(parameters, kind=kind, **settings)


def one_step(parameters, optimizer, seed, learning_rate=1e-2):
    generator = torch.Generator().manual_seed(1000 + seed)
    optimizer.zero_grad()
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.set_learning_rate(learning_rate)
    optimizer.step()


def test_adamw_is_torch_adamw():
    ours, optimizer = make(betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6)
    theirs, _ = make()
    matrices = [p for p in theirs.values() if p.ndim >= 2]
    vectors = [p for p in theirs.values() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-6,
    )
    for step in range(5):
        one_step(ours, optimizer, step)
        for name, parameter in theirs.items():
            parameter.grad = ours[name].grad.clone()
        reference.step()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_is_for_matrices_only(kind):
    """With no gradient to speak of, decay alone shrinks matrices and leaves norm scales alone."""
    parameters, optimizer = make(kind, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.set_learning_rate(0.1)
    optimizer.step()
    for name, parameter in parameters.items():
        factor = 0.95 if parameter.ndim >= 2 else 1.0
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_move_at_1e_6(kind):
    """AdamW at 1e-6 directly on bf16 weights of 1.0 rounds to nothing, however many steps."""
    parameter = nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = build_optimizer({"w": parameter}, kind=kind)
    optimizer.set_learning_rate(1e-6)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    steps(100)
    master = optimizer.state_tensors()["w.master"]
    assert master.dtype == torch.float32
    assert torch.allclose(master, torch.full_like(master, 1 - 1e-4), rtol=0, atol=5e-6)
    # One bf16 step below 1 is 2**-8; the rounding to it begins at half of that, step ~1,953.
    assert (parameter == 1).all()
    steps(2100)
    assert (parameter < 1).all(), "the master has moved far enough: the weight must follow"
    assert parameter.dtype == torch.bfloat16

    direct = nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([direct], lr=1e-6, weight_decay=0.0)
    for _ in range(2200):
        direct.grad = torch.ones_like(direct)
        plain.step()
    assert (direct == 1).all(), "without a master it does not move; else this test shows nothing"


def test_micro_batches_add_up_in_float32():
    """256 + 1 is 256 in bf16: a small micro-batch after a large one would vanish."""
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimizer = build_optimizer({"w": parameter})
    for value in (256.0, 1.0, 1.0):
        (parameter * value).sum().backward()
        optimizer.accumulate()
    assert optimizer.clip_grad_norm(1e9) == pytest.approx(2 * 258.0)
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm(1e9) == 0.0


def test_float32_parameters_are_their_own_masters():
    parameters, optimizer = make()
    assert not any(name.endswith(".master") for name in optimizer.state_tensors())
    for name, parameter in parameters.items():
        assert optimizer.masters[name] is parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_grad_norm(dtype):
    parameters = {
        "a": nn.Parameter(torch.zeros(1, 2, dtype=dtype)),
        "b": nn.Parameter(torch.zeros(1, dtype=dtype)),
        "unused": nn.Parameter(torch.zeros(3, dtype=dtype)),
    }
    optimizer = build_optimizer(parameters)
    parameters["a"].grad = torch.tensor([[2.0, 4.0]], dtype=dtype)
    parameters["b"].grad = torch.tensor([4.0], dtype=dtype)
    assert optimizer.clip_grad_norm(10.0) == pytest.approx(6.0)
    assert optimizer.clip_grad_norm(1.5) == pytest.approx(6.0), "the norm before clipping"
    assert optimizer.clip_grad_norm(1e9) == pytest.approx(1.5), "and now it is clipped"


def test_a_norm_that_is_not_finite_is_reported_and_not_spread():
    """Scaling by 1 / NaN would turn every other gradient into NaN as well."""
    for poison in (float("nan"), float("inf")):
        parameters, optimizer = make()
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        parameters["head.weight"].grad[0, 0] = poison
        assert not math.isfinite(optimizer.clip_grad_norm(0.1))
        assert (parameters["layer.weight"].grad == 1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(kind, dtype):
    """k steps, save, restore into fresh objects, k steps = 2k steps, through real safetensors."""
    straight, optimizer = make(kind, dtype, weight_decay=0.1)
    for step in range(6):
        one_step(straight, optimizer, step)

    first, saved_optimizer = make(kind, dtype, weight_decay=0.1)
    for step in range(3):
        one_step(first, saved_optimizer, step)
    file = save(saved_optimizer.state_tensors())
    weights = {name: p.detach().clone() for name, p in first.items()}

    second, restored = make(kind, dtype, seed=99, weight_decay=0.1)
    with torch.no_grad():
        for name, parameter in second.items():
            if dtype == torch.float32:  # bf16 weights come back with their masters
                parameter.copy_(weights[name])
    restored.load_state_tensors(load(file))
    for step in range(3, 6):
        one_step(second, restored, step)

    for name in straight:
        assert torch.equal(straight[name], second[name]), name
    theirs = restored.state_tensors()
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(tensor, theirs[name]), name


def test_state_of_a_run_that_has_not_stepped():
    """A kill before the first step must leave a checkpoint that loads."""
    parameters, optimizer = make()
    saved = load(save(optimizer.state_tensors()))
    one_step(parameters, optimizer, 0)
    optimizer.load_state_tensors(saved)
    assert all((t == 0).all() for t in optimizer.state_tensors().values())


def test_names_of_the_state():
    _, optimizer = make(dtype=torch.bfloat16)
    keys = {"step", "exp_avg", "exp_avg_sq", "master"}
    names = {name for name in optimizer.state_tensors() if name.startswith("layer.weight.")}
    assert names == {f"layer.weight.{key}" for key in keys}


def test_8bit_states_are_bytes_and_the_shared_table_is_not_saved():
    _, optimizer = make("adamw_8bit")
    state = optimizer.state_tensors()
    assert state["layer.weight.state1"].dtype == torch.uint8
    assert state["norm.weight.state1"].dtype == torch.float32, "too small to quantise"
    assert not any("qmap" in name for name in state)


def test_state_tensors_is_a_snapshot():
    """A checkpoint written in the background must not change under the next step."""
    parameters, optimizer = make()
    one_step(parameters, optimizer, 0)
    snapshot = optimizer.state_tensors()
    copy = {name: tensor.clone() for name, tensor in snapshot.items()}
    one_step(parameters, optimizer, 1)
    assert all(torch.equal(snapshot[name], copy[name]) for name in copy)
    assert all(tensor.is_contiguous() for tensor in snapshot.values())
    assert len({t.untyped_storage().data_ptr() for t in snapshot.values()}) == len(snapshot)


def broken(state, how):
    state = dict(state)
    if how == "missing":
        del state["head.weight.exp_avg"]
    elif how == "shape":
        state["head.weight.exp_avg"] = state["head.weight.exp_avg"][:2].clone()
    elif how == "type":
        state["head.weight.exp_avg"] = state["head.weight.exp_avg"].half()
    else:
        state["other.weight.exp_avg"] = torch.zeros(2)
    return state


@pytest.mark.parametrize("how", ["missing", "shape", "type", "unknown"])
def test_a_foreign_state_is_refused_by_name_and_changes_nothing(how):
    parameters, optimizer = make()
    one_step(parameters, optimizer, 0)
    state = optimizer.state_tensors()
    one_step(parameters, optimizer, 1)
    before = optimizer.state_tensors()
    with pytest.raises(UserError) as error:
        optimizer.load_state_tensors(broken(state, how))
    name = "other.weight.exp_avg" if how == "unknown" else "head.weight.exp_avg"
    assert name in str(error.value) and "\n" not in str(error.value)
    assert all(torch.equal(t, before[name]) for name, t in optimizer.state_tensors().items())


def test_a_state_of_another_optimizer_is_refused():
    _, eight_bit = make("adamw_8bit")
    _, optimizer = make()
    with pytest.raises(UserError, match="optimizer settings"):
        optimizer.load_state_tensors(eight_bit.state_tensors())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_8bit_goes_where_adamw_goes(kind):
    """Quantised states, same direction: a quadratic is brought near its minimum."""
    parameter = nn.Parameter(torch.full((64, 80), 3.0))
    optimizer = build_optimizer({"w": parameter}, kind=kind)
    optimizer.set_learning_rate(0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()
    assert parameter.abs().max() < 0.3


def test_unknown_kind_is_refused():
    with pytest.raises(UserError, match="--optimizer: 'adam'"):
        make("adam")


def test_missing_bitsandbytes_names_the_way_out(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="use --optimizer adamw"):
        make("adamw_8bit")


def test_learning_rate_is_what_was_set():
    parameters, optimizer = make()
    assert optimizer.learning_rate == 0.0
    one_step(parameters, optimizer, 0, learning_rate=3e-4)
    assert optimizer.learning_rate == 3e-4


def test_learning_rate_of_the_docstring():
    rates = [learning_rate_at(step, 10, 1.0, "linear", 0.2) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3] + [n / 8 for n in range(8, 0, -1)])


@pytest.mark.parametrize("scheduler", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_learning_rate_course(scheduler, warmup, total):
    """Never 0 within the run (a first step at rate 0 learns nothing), never above the base."""
    rates = [learning_rate_at(step, total, 2e-6, scheduler, warmup) for step in range(total)]
    assert all(0 < rate <= 2e-6 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if warmup < 1:
        assert max(rates) == 2e-6 and peak == int(warmup * total)


def test_cosine_is_half_way_down_in_the_middle():
    assert learning_rate_at(50, 100, 1.0, "cosine", 0.0) == pytest.approx(0.5)
    assert learning_rate_at(25, 100, 1.0, "cosine", 0.0) == pytest.approx(0.5 + math.sqrt(0.125))


def test_the_rate_after_the_end_does_not_rise_again():
    """cos goes up again past pi: a resumed run that is longer than planned must not see that."""
    assert learning_rate_at(150, 100, 1.0, "cosine", 0.0) == 0.0
    assert learning_rate_at(150, 100, 1.0, "linear", 0.0) == 0.0


def test_unknown_scheduler_is_refused():
    with pytest.raises(UserError, match="'cosin'"):
        learning_rate_at(5, 10, 1.0, "cosin", 0.0)
