"""Sets of operators that return the same bits when they run again on the same inputs.

base_name("aten::mul.Tensor")           "aten::mul"
base_name(name) in DEFAULT              may run again on every device
base_name(name) in PRODUCTS             may run again where a replay was tested bit for bit on the device
base_name(name) in VIEWS                makes a view: computes nothing and writes nothing

Operators in no set must not run again: attention, collectives, custom operators, scatters with atomic additions. In-place
variants are in the same sets, because an operator that writes to its input is replayed on a copy.
"""

from __future__ import annotations


def base_name(op_name: str) -> str:
    """Name of an operator without its overload, as in the sets below."""
    return op_name.partition(".")[0]


def _aten(text: str, *, in_place: bool = False) -> frozenset[str]:
    names = text.split()
    return frozenset(f"aten::{name}{ending}" for name in names for ending in (("", "_") if in_place else ("",)))


VIEWS = _aten(
    """
    _reshape_alias _unsafe_view alias as_strided chunk contiguous detach diagonal expand expand_as flatten lift lift_fresh
    movedim narrow permute real imag resolve_conj resolve_neg select slice split split_with_sizes squeeze squeeze_ swapaxes
    t t_ tensor_split transpose transpose_ unbind unflatten unfold unsqueeze unsqueeze_ view view_as view_as_complex
    view_as_real _conj _neg_view unsafe_split unsafe_split_with_sizes unsafe_chunk set_data detach_ _nested_view_from_buffer
    """
)
"""Operators whose result is in an existing storage. A trace lists that storage as returned; its bytes do not change."""

ELEMENTWISE = (
    _aten(
        """
        abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min copysign cos cosh deg2rad digamma div elu eq erf
        erfc erfinv exp exp2 expm1 fill float_power floor floor_divide fmod frac gcd ge gelu gt hardsigmoid hardswish
        hardtanh heaviside hypot i0 ldexp le leaky_relu lerp lgamma log log10 log1p log2 logical_and logical_not logical_or
        logical_xor logit lt masked_fill maximum minimum mish mul mvlgamma nan_to_num ne neg nextafter pow rad2deg
        reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh sqrt square sub tan tanh
        threshold tril triu trunc where xlogy zero
        """,
        in_place=True,
    )
    | _aten(
        """
        _log_softmax _safe_softmax _softmax _to_copy arange cat clone complex constant_pad_nd copy copy_ empty empty_like
        empty_permuted empty_strided eye fmax fmin full full_like glu hardshrink isfinite isinf isnan isneginf isposinf
        linspace log_sigmoid_forward logaddexp logaddexp2 new_empty new_empty_strided new_full new_ones new_zeros ones
        ones_like polar prelu _prelu_kernel reflection_pad1d reflection_pad2d repeat replication_pad1d replication_pad2d
        roll flip rot90 scalar_tensor signbit softplus softshrink special_entr special_erfcx special_expit stack tanhshrink
        zeros zeros_like upsample_nearest1d upsample_nearest2d upsample_nearest3d index slice_scatter select_scatter
        pixel_shuffle pixel_unshuffle channel_shuffle repeat_interleave gather index_select take_along_dim
        max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d
        """
    )
    | frozenset({"prims::convert_element_type", "prims::device_put", "prims::view_of"})
)
"""Operators that compute each result element from few inputs: arithmetic, activations, casts, copies, comparisons, softmax,
padding, pooling, gathers, and the factories that start a chain of operators."""

NORMS = _aten(
    """
    _fused_rms_norm all amax amin aminmax any argmax argmin count_nonzero cudnn_batch_norm linalg_vector_norm logsumexp max
    mean min miopen_batch_norm native_batch_norm native_group_norm native_layer_norm norm nansum prod rms_norm std std_mean
    sum var var_mean
    """
)
"""Normalisations, and the reductions used in hand-written ones. Each kernel sums in a fixed order. A batch norm that updates
or reads running statistics is recognised by the tensors that it reads and writes."""

RANDOM = _aten(
    """
    bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout normal normal_ rand
    rand_like randint randint_like randn randn_like random_ randperm rrelu_with_noise rrelu_with_noise_ uniform uniform_
    """
)
"""Operators that draw random numbers: the same numbers again if the generator's state is restored first."""

BATCH_NORMS = _aten("cudnn_batch_norm miopen_batch_norm native_batch_norm")
"""Operators of `NORMS` that run again without running statistics that they update, but not if they only read them."""

EMBEDDING = _aten("embedding")

PRODUCTS = _aten(
    """
    _convolution addbmm addmm addmm_ addmv addr baddbmm bmm convolution cudnn_convolution dot linear matmul
    mkldnn_convolution mm mv _addmm_activation _grouped_mm _scaled_mm conv1d conv2d conv3d
    """
)
"""Matrix products and convolutions: kernels that split a sum may add its parts in a different order each time."""

DEFAULT = ELEMENTWISE | NORMS | RANDOM | EMBEDDING
"""Operators that may run again without a test on the device."""
