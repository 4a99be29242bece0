"""``deepwell.AdamW``: the optimizer of PyTorch, with one kernel for each parameter."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw as torch_adamw

from deepwell import plans, swaps
from deepwell.library import DeepwellError, is_available

#: States in FP32, whatever the type of the parameter.
_WIDE = ("exp_avg", "exp_avg_sq", "master_weight")


class AdamW(torch.optim.AdamW):
    """AdamW with the arguments, ``param_groups`` and state names of ``torch.optim.AdamW``.

    Moments are FP32. A BF16 parameter has an FP32 ``master_weight`` in its state, from which it is
    rounded at each step, so that updates below half a unit in the last place are not lost; this
    takes 12 bytes per parameter where PyTorch takes 4. A ``state_dict`` of ``torch.optim.AdamW``
    loads, and PyTorch loads one of this class.

    Parameters without a kernel (FP16, not contiguous, sparse gradients, no GPU) are updated by
    PyTorch, which is said once. ``on_cpu`` uses the library's CPU kernels, which are slow.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        on_cpu: bool = False,
    ):
        for name, value in (("amsgrad", amsgrad), ("maximize", maximize)):
            if value:
                raise ValueError(f"{name}: expected False, got True\nhint: use torch.optim.AdamW")
        super().__init__(params, lr, betas, eps, weight_decay)
        self._on_cpu = on_cpu
        #: Versions of BF16 parameters after the last step, by parameter.
        self._versions: dict[torch.Tensor, int] = {}
        self._unavailable = "" if on_cpu else is_available()[1]

    @torch.no_grad()
    def step(self, closure=None):
        """Updates all parameters that have gradients."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise DeepwellError(
                "expected a step outside of a CUDA graph, which would keep the step's number\n"
                "hint: capture forward and backward only"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def __getstate__(self):
        own = {name: self.__dict__[name] for name in ("_on_cpu", "_unavailable")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        # Copied parameters have versions of their own.
        self._versions = {}

    def _step_group(self, group) -> None:
        if group["amsgrad"] or group["maximize"]:
            raise ValueError(
                "param_groups: expected amsgrad and maximize to be False\n"
                "hint: use torch.optim.AdamW"
            )
        served, others = [], []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            reason = self._rejects(parameter)
            if reason:
                swaps.count_fallback("AdamW", reason)
            (others if reason else served).append(parameter)
            if not self.state[parameter]:
                self._initialize(parameter, wide=not reason)
        if served:
            self._run_kernels(group, served)
        if others:
            self._run_torch(group, others)

    def _rejects(self, parameter) -> str | None:
        """Why no kernel updates a parameter; ``None`` if one does."""
        local, gradient = _local(parameter), _local(parameter.grad)
        if local.device.type == "cpu" and not self._on_cpu:
            return "kernels run on GPUs (`on_cpu=True` runs those of the CPU)"
        if local.device.type not in ("cpu", "cuda"):
            return f"kernels run on CUDA devices, not on `{local.device.type}`"
        if self._unavailable:
            return self._unavailable
        if gradient.layout != torch.strided:
            return "kernels take dense gradients"
        if local.dtype not in (torch.float32, torch.bfloat16) or gradient.dtype != local.dtype:
            return f"kernels take BF16 or FP32, not {local.dtype} with gradients {gradient.dtype}"
        if not (local.is_contiguous() and gradient.is_contiguous()):
            return "kernels take contiguous parameters and gradients"
        if local.data_ptr() % plans.ALIGNMENT_BYTES:
            return f"kernels take parameters at multiples of {plans.ALIGNMENT_BYTES} bytes"
        return None

    def _initialize(self, parameter, wide: bool) -> None:
        state = self.state[parameter]
        dtype = torch.float32 if wide else parameter.dtype
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(
                parameter, dtype=dtype, memory_format=torch.preserve_format
            )

    def _run_kernels(self, group, parameters) -> None:
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1)
        coefficients: dict[tuple, torch.Tensor] = {}
        weight_decay = float(group["weight_decay"])
        for parameter, step in zip(parameters, steps):
            local = _local(parameter)
            if not local.numel():
                continue
            key = (step.item(), local.device)
            if key not in coefficients:
                coefficients[key] = _coefficients(group, *key)
            self._update(parameter, local, coefficients[key], weight_decay)
        increment_version([_local(parameter) for parameter in parameters])
        for parameter in parameters:
            if parameter.dtype == torch.bfloat16:
                self._versions[parameter] = _local(parameter)._version

    def _update(self, parameter, local, coefficients, weight_decay: float) -> None:
        state = self.state[parameter]
        moments = [_local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
        gradient = _local(parameter.grad)
        outputs = []
        if local.dtype == torch.bfloat16:
            master = _local(self._master(parameter, local))
            gradient, outputs = gradient.float(), [local]
        else:
            master, gradient = local, plans.aligned(gradient)
        flat = [tensor.view(-1) for tensor in (gradient, master, *moments, *outputs)]
        op = _op(weight_decay, bool(outputs))
        plans.run_in_place(op, [coefficients, *flat[:4]], flat[4:], updated=(2, 3, 4))

    def _master(self, parameter, local) -> torch.Tensor:
        """The FP32 weight of a BF16 parameter. Elements that something else has written since the
        last step are taken over from the parameter."""
        state = self.state[parameter]
        if "master_weight" not in state:
            state["master_weight"] = parameter.detach().float()
        elif self._versions.get(parameter) != local._version:
            master = _local(state["master_weight"])
            changed = master.to(local.dtype) != local
            master.copy_(torch.where(changed, local.float(), master))
        return state["master_weight"]

    def _run_torch(self, group, parameters) -> None:
        states = [self.state[parameter] for parameter in parameters]
        columns = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        torch_adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            *columns,
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict) -> None:
        """Loads a state of this class, or of ``torch.optim.AdamW``."""
        super().load_state_dict(state_dict)
        self._versions.clear()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            # A fused optimizer of PyTorch has its steps on the device.
            group.update(fused=None, foreach=None, capturable=False)
        for index, parameter in zip(saved, own):
            state = state_dict["state"].get(index)
            if not state:
                continue
            target = self.state[parameter]
            target["step"] = torch.as_tensor(state["step"]).detach().float().cpu().clone()
            wide = parameter.dtype in (torch.float32, torch.bfloat16)
            for name in _WIDE:
                # PyTorch has rounded these to the type of the parameter.
                if wide and name in state:
                    target[name] = (
                        state[name]
                        .detach()
                        .to(device=parameter.device, dtype=torch.float32, copy=True)
                    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor on this rank, or a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _op(weight_decay: float, rounds: bool) -> bytes:
    copies = [{"parameter": 0, "kind": {"cast": {"to": "bf16"}}}] if rounds else []
    key = (weight_decay, rounds)
    if key not in _OPS:
        _OPS[key] = plans.encode(
            "adam_w", parameters={"start": 0, "end": 1}, weight_decay=[weight_decay], copies=copies
        )
    return _OPS[key]


#: Ops by weight decay, and whether a BF16 copy is written.
_OPS: dict[tuple[float, bool], bytes] = {}


def _coefficients(group, step: float, device: torch.device) -> torch.Tensor:
    """The numbers that all elements share, in the order of the op `adam_w_coefficients`."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = float(group["lr"])
    numbers = [
        1.0, lr, 1.0, 1.0 - beta1, beta2, 1.0 - beta2, lr / (1.0 - beta1**step),
        (1.0 - beta2**step) ** -0.5, float(group["eps"]),
    ]  # fmt: skip
    if device.type == "cpu":
        return torch.tensor(numbers)
    # Pinned, so that the host does not wait for the device.
    return torch.tensor(numbers).pin_memory().to(device, non_blocking=True)
