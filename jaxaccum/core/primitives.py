"""The one table of JAX's primitives: what may be taken for granted of each.

A primitive that does not stand here has no trait, and that is the safe answer: it is not cheap, so
its results are kept; it has a derivative; it acts, so it is run. Only where a multiple is looked
for (`MULTIPLE`) is no answer safe; `devices.local_values.check_undivided` says what it does there.
"""

# Its results are multiples of what goes in, or contain it.
MULTIPLE = "multiple"
# Elementwise or mere layout: computed again where it is read rather than kept.
CHEAP = "cheap"
# Each result comes of the input in its place alone (but for the order of a `sort`).
ALIGNED = "aligned"
# Its results have no derivative, whatever goes in.
FLAT = "flat"
# It only tells the host something: where nobody waits for its results, it may be left out.
REPORT = "report"
# Over its axes everybody gives a part, and gets the same: the sum, an extreme, all parts.
SUM, EXTREME, GATHER = "sum", "extreme", "gather"

_ROWS = (
    (
        (MULTIPLE, CHEAP),
        """add add_any broadcast_in_dim concatenate conj convert_element_type copy copy_p div
        expand_dims imag mul neg pad real reduce_precision reshape rev select_n slice split squeeze
        stack sub transpose""",
    ),
    (
        (MULTIPLE,),
        """all_to_all cumsum device_put dynamic_slice dynamic_update_slice layout_constraint name
        pbroadcast pcast ppermute psum_scatter pvary reduce_scatter reduce_sum reshard
        sharding_constraint""",
    ),
    ((MULTIPLE, ALIGNED), "optimization_barrier"),
    ((MULTIPLE, ALIGNED, SUM), "psum psum2 psum_invariant"),
    ((MULTIPLE, ALIGNED, EXTREME), "pmax pmin"),
    ((MULTIPLE, ALIGNED, GATHER), "all_gather all_gather_invariant"),
    ((MULTIPLE, CHEAP, FLAT), "stop_gradient"),
    ((CHEAP, FLAT), "ceil floor round sign"),
    (
        (CHEAP,),
        """abs and atan2 clamp cos eq erf exp exp2 expm1 ge gt integer_pow iota is_finite le log
        log1p logistic lt max min ne not or pow random_fold_in random_seed random_split
        random_unwrap random_wrap rem rsqrt sin sqrt square tanh xor""",
    ),
    (
        (),
        """acos acosh approx_top_k argmax argmin asin asinh atan atanh axis_index bessel_i0e
        bessel_i1e bitcast_convert_type cbrt cholesky clz complex conv_general_dilated cosh
        cumlogsumexp cummax cummin cumprod custom_linear_solve digamma dot_general eig eigh empty
        empty2 eq_to erf_inv erfc fft gather hessenberg householder_product igamma igamma_grad_a
        igammac le_to lgamma lt_to lu nextafter polygamma population_count pure_callback qr
        ragged_dot_general random_bits random_gamma reduce reduce_and reduce_max reduce_min
        reduce_or reduce_prod reduce_window reduce_window_max reduce_window_min reduce_window_sum
        reduce_xor regularized_incomplete_beta rng_bit_generator rng_uniform scaled_dot scatter
        scatter-add scatter-max scatter-min scatter-mul scatter-sub schur select_and_gather_add
        select_and_scatter_add shift_left shift_right_arithmetic shift_right_logical sinh svd
        tan threefry2x32 top_k triangular_solve tridiagonal tridiagonal_solve zeta""",
    ),
    ((ALIGNED,), "sort"),
    ((REPORT,), "debug_callback debug_print inspect_sharding io_callback"),
)
_TRAITS = {name: frozenset(traits) for traits, names in _ROWS for name in names.split()}

# Primitives that only call another program, and the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# Calls that bring a derivative of their own.
CUSTOM = frozenset(["custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"])
# Their results are those of a program too, but in surroundings of its own.
WITHIN = {
    "shard_map": "jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "write_in_place": "program",
}


def has(primitive: str, trait: str) -> bool:
    """Whether a primitive has one of the traits above."""
    return trait in _TRAITS.get(primitive, ())


def is_known(primitive: str) -> bool:
    """Whether a primitive stands in the table."""
    return primitive in _TRAITS
