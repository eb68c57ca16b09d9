# ruff: noqa: E501
"""A table of the JAX expressions that are tried in bundles, by family. As a program it prints the page's tables.

Each entry of a family is `name: expression` over the arrays of `INPUTS`; or `names (arguments)` for functions
that are called alike. ` | ` stands between entries of a line.
"""

import re

INPUTS = {
    "x": "float32[4, 4]",  # between 0.1 and 0.9
    "y": "float32[4, 4]",  # between 0.1 and 0.9
    "v": "float32[4]",  # ascending, between 0.1 and 0.9
    "s": "float32[4, 4]",  # symmetric, positive definite
    "i": "int32[4, 4]",  # between 1 and 7
    "j": "int32[4, 4]",  # between 1 and 7
    "b": "bool[4, 4]",
    "c": "complex64[4, 4]",
    "k": "uint32[2]",  # the data of a random key
    "image": "float32[1, 8, 8, 2]",
}

_TABLE = {
    "jax.numpy: one array, by element": """
jnp.abs absolute acos arccos arcsin arcsinh arctan arctanh asin asinh atan atanh cbrt ceil conj conjugate \
cos cosh deg2rad degrees exp exp2 expm1 fabs floor frexp i0 isfinite isinf isnan isneginf isposinf log log10 \
log1p log2 modf nan_to_num negative positive rad2deg radians reciprocal rint round sign signbit sin sinc \
sinh spacing sqrt square tan tanh trunc around (x)
jnp.acosh arccosh (x + 1) | jnp.angle imag real iscomplex isreal (c)
jnp.bitwise_count bitwise_invert bitwise_not invert (i) | jnp.logical_not (b) | jnp.unwrap (9 * v)
""",
    "jax.numpy: two arrays, by element": """
jnp.add arctan2 atan2 copysign divide divmod equal float_power floor_divide fmax fmin fmod greater \
greater_equal heaviside hypot isclose less less_equal logaddexp logaddexp2 maximum minimum mod multiply \
nextafter not_equal pow power remainder subtract true_divide (x, y)
jnp.bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm left_shift right_shift \
(i, j)
jnp.logical_and logical_or logical_xor (b, i > 3) | jnp.ldexp (x, i) | jnp.clip (x, 0.3, y)
jnp.where (b, x, y) | jnp.select ([b, i > 3], [x, y], 2.0)
jnp.piecewise (x, [x < 0.5, x >= 0.5], [jnp.sin, lambda t: t * 2])
""",
    "jax.numpy: reductions and statistics": """
jnp.all any count_nonzero (b)
jnp.amax amin argmax argmin average cumprod cumsum max mean median min nanargmax nanargmin nancumprod \
nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp std sum var (x)
jnp.cumulative_prod cumulative_sum (x, axis=1) | jnp.nanpercentile percentile (x, 30)
jnp.nanquantile quantile (x, jnp.array([0.1, 0.7])) | jnp.corrcoef cov (x)
jnp.allclose array_equal array_equiv (x, y) | jnp.trapezoid (x) | jnp.bincount (i.ravel(), length=9)
jnp.digitize (x, v) | jnp.searchsorted (v, x) | jnp.histogram (x, 5)
jnp.histogram2d (x.ravel(), y.ravel(), 3) | jnp.histogramdd (x, 2) | jnp.histogram_bin_edges (x, 5)
jnp.apply_along_axis (jnp.cumsum, 0, x) | jnp.apply_over_axes (jnp.sum, x, (0, 1))
""",
    "jax.numpy: shapes and indices": """
jnp.atleast_1d atleast_2d atleast_3d copy diag diagflat diagonal flip fliplr flipud matrix_transpose ravel \
rot90 squeeze transpose tril triu array asarray (x)
jnp.append (x, y) | jnp.column_stack concatenate concat dstack hstack vstack stack ((x, y))
jnp.array_split (x, 3) | jnp.hsplit split vsplit (x, 2) | jnp.dsplit (x.reshape(2, 2, 4), 2) | jnp.unstack (x)
jnp.block ([[x, y], [y, x]]) | jnp.broadcast_arrays (x, v) | jnp.broadcast_to (v, (3, 4))
jnp.compress (b[0], x, axis=0, size=2) | jnp.delete (x, 1, axis=0) | jnp.expand_dims (x, 1)
jnp.extract (b, x, size=3) | jnp.fill_diagonal (x, 7.0, inplace=False) | jnp.insert (x, 1, 5.0, axis=0)
jnp.ix_: x[jnp.ix_(i[0] % 4, j[0] % 4)] | jnp.moveaxis (image, 0, -1) | jnp.rollaxis (image, 2)
jnp.pad (x, 1, mode="reflect") | jnp.permute_dims (x, (1, 0)) | jnp.place (x, b, v, inplace=False)
jnp.put (x, i[0], v, inplace=False) | jnp.put_along_axis (x, i[:1] % 4, v[None], 0, inplace=False)
jnp.ravel_multi_index ((i % 4, j % 4), (4, 4), mode="clip") | jnp.unravel_index (i, (4, 4))
jnp.repeat (x, 2, axis=1) | jnp.reshape (x, (2, 8)) | jnp.resize (x, (3, 3)) | jnp.roll (x, 1, axis=1)
jnp.swapaxes (image, 1, 3) | jnp.take (x, i % 4) | jnp.take_along_axis (x, i % 4, axis=1)
jnp.tile (x, (2, 1)) | jnp.astype (x, jnp.int16) | jnp.packbits (b) | jnp.unpackbits (i.astype(jnp.uint8))
.at[].set: x.at[1, i[0] % 4].set(v) | .at[].add: x.at[i[0] % 4].add(y) | .at[].max: x.at[i[0] % 4].max(y)
.at[].get: x.at[i % 9].get(mode="fill", fill_value=0)
""",
    "jax.numpy: making arrays": """
jnp.empty_like ones_like zeros_like (x) | jnp.arange: jnp.arange(3, 9) + i[0, 0]
jnp.bartlett blackman hamming hanning (5) | jnp.kaiser (5, 3.0) | jnp.eye identity ones zeros empty (3)
jnp.full ((2, 3), x[0, 0]) | jnp.full_like (x, 7)
jnp.fromfunction: jnp.fromfunction(lambda a, b: a + b, (3, 3)) + x[:3, :3] | jnp.diag_indices (3)
jnp.diag_indices_from tril_indices_from triu_indices_from (x) | jnp.indices ((2, 3)) | jnp.meshgrid (v, v)
jnp.tri tril_indices triu_indices (3) | jnp.linspace (v[0], v[1], 5) | jnp.geomspace (v[0], v[1], 5)
jnp.logspace (v[0], v[1], 5) | jnp.vander (v)
""",
    "jax.numpy: products and polynomials": """
jnp.convolve (v, v) | jnp.correlate (v, v) | jnp.cross (x[:, :3], y[:, :3])
jnp.dot inner kron matmul outer tensordot vdot vecdot (x, y) | jnp.matvec (x, v) | jnp.vecmat (v, x)
jnp.einsum ("ij,kj->ik", x, y) | jnp.trace (x) | jnp.diff ediff1d gradient (x) | jnp.interp (x, v, v * 2)
jnp.poly (v) | jnp.polyadd polymul polysub (v, v + 1) | jnp.polyder polyint (v) | jnp.polydiv (v, v[:2])
jnp.polyfit (v, x, 2) | jnp.polyval (v, x)
jnp.vectorize: jnp.vectorize(lambda a: a.sum(), signature="(n)->()")(x)
jnp.frompyfunc: jnp.frompyfunc(lax.add, 2, 1, identity=0).reduce(x)
""",
    "jax.numpy: sorting and sets": """
jnp.argsort sort sort_complex (x) | jnp.argpartition: jnp.argpartition(v, 2)[2]
jnp.partition: jnp.partition(v, 2)[2] | jnp.lexsort ((i[0], j[0]))
jnp.argwhere flatnonzero nonzero (b, size=5) | jnp.isin (i, j)
jnp.intersect1d setdiff1d setxor1d union1d (i, j, size=4)
jnp.unique unique_all unique_counts unique_inverse unique_values (i, size=4)
""",
    "jax.numpy.linalg": """
jnp.linalg.cholesky eigh eigvalsh (s)
jnp.linalg.cond det diagonal inv matrix_norm matrix_rank matrix_transpose norm pinv qr slogdet svdvals trace \
vector_norm (x)
jnp.linalg.svd (x, compute_uv=False) | jnp.linalg.cross (x[:, :3], y[:, :3])
jnp.linalg.lstsq: jnp.linalg.lstsq(s, v)[0] | jnp.linalg.matmul tensordot vecdot (x, y)
jnp.linalg.outer (v, v) | jnp.linalg.matrix_power (x, 3) | jnp.linalg.multi_dot ((x, y, x))
jnp.linalg.solve (s, v) | jnp.linalg.tensorinv (s, ind=1) | jnp.linalg.tensorsolve (s, v)
""",
    "jax.numpy.fft": """
jnp.fft.fft fft2 fftn fftshift ifft ifft2 ifftn ifftshift rfft rfft2 rfftn ihfft (x)
jnp.fft.hfft irfft irfft2 irfftn (c) | jnp.fft.fftfreq rfftfreq (5)
""",
    "jax.lax: by element": """
lax.abs acos asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor is_finite log \
log1p logistic neg reciprocal round rsqrt sign sin sinh sqrt square tan tanh (x)
lax.acosh (x + 1) | lax.conj imag real (c)
lax.add atan2 complex div eq ge gt le lt max min mul ne nextafter pow rem sub (x, y)
lax.bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical mulhi (i, j)
lax.bitwise_not clz population_count (i) | lax.integer_pow (x, 3) | lax.clamp (0.2, x, 0.6)
lax.select (b, x, y) | lax.select_n (b, x, y) | lax.reduce_precision (x, 5, 3)
lax.convert_element_type (x, jnp.bfloat16) | lax.bitcast_convert_type (x, jnp.int32)
lax.stop_gradient optimization_barrier (x)
""",
    "jax.lax: special functions": """
lax.bessel_i0e bessel_i1e digamma lgamma (x) | lax.betainc (x, y, x)
lax.igamma igamma_grad_a igammac random_gamma_grad (x, y) | lax.polygamma (lax.floor(3 * x + 1), y)
lax.zeta (x + 2, y)
""",
    "jax.lax: shapes, reductions and products": """
lax.argmax argmin (x, 0, jnp.int32) | lax.batch_matmul dot (x, y) | lax.broadcast (x, (2,))
lax.broadcast_in_dim (v, (4, 4), (1,)) | lax.broadcasted_iota (jnp.int32, (3, 4), 1) | lax.iota (jnp.int32, 5)
lax.collapse (image, 1, 3) | lax.concatenate ((x, y), 0) | lax.cumlogsumexp cummax cummin cumprod cumsum (x)
lax.dot_general (x, y, (((1,), (0,)), ((), ()))) | lax.ragged_dot (x, jnp.stack([x, y]), jnp.array([1, 3]))
lax.dynamic_index_in_dim (x, i[0, 0] % 4) | lax.dynamic_slice (x, (i[0, 0] % 3, j[0, 0] % 3), (2, 2))
lax.dynamic_slice_in_dim (x, i[0, 0] % 3, 2) | lax.dynamic_update_slice (x, y[:2, :2], (i[0, 0] % 3, 1))
lax.dynamic_update_slice_in_dim (x, y[:2], i[0, 0] % 3, 0)
lax.dynamic_update_index_in_dim (x, v, i[0, 0] % 4, 0) | lax.expand_dims (x, (1,)) | lax.full ((2, 2), v[0])
lax.gather: x[i % 4, j % 4] | lax.index_in_dim (x, 2) | lax.index_take (x, (i[0] % 4,), (0,))
lax.pad (x, 0.0, ((1, 2, 1), (0, -1, 0))) | lax.reduce (x, 0.0, lax.add, (1,))
lax.reduce_max reduce_min reduce_prod reduce_sum (x, (0,)) | lax.reduce_and reduce_or (b, (0,))
lax.reduce_xor (i, (0,)) | lax.reduce_window (x, 0.0, lax.add, (2, 2), (1, 1), "VALID")
lax.reshape (x, (2, 8)) | lax.rev (x, (0,)) | lax.scatter_add: x.at[i[0] % 4].add(v)
lax.scatter_mul: x.at[i[0] % 4].multiply(y) | lax.scatter_apply: x.at[i[0, 0] % 4].apply(jnp.sin)
lax.slice (x, (0, 1), (4, 4), (2, 1)) | lax.slice_in_dim (x, 1, 3) | lax.sort (x) | lax.sort_key_val (x, y)
lax.split (x, (1, 3)) | lax.squeeze (image, (0,)) | lax.tile (x, (1, 2)) | lax.transpose (x, (1, 0))
lax.top_k (x, 2) | lax.approx_max_k approx_min_k (x, 2)
lax.conv (image.transpose(0, 3, 1, 2), jnp.ones((3, 2, 3, 3)), (1, 1), "SAME")
lax.conv_general_dilated (image, jnp.ones((3, 3, 2, 5)), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", \
"NHWC"))
lax.conv_general_dilated_patches (image.transpose(0, 3, 1, 2), (2, 2), (1, 1), "VALID")
lax.conv_transpose (image, jnp.ones((3, 3, 2, 5)), (2, 2), "SAME")
lax.conv_with_general_padding (image.transpose(0, 3, 1, 2), jnp.ones((3, 2, 3, 3)), (1, 1), ((1, 1), (0, \
2)), (1, 1), (1, 1))
lax.fft (c, "FFT", (4,)) | lax.rng_bit_generator (jnp.concatenate([k, k]), (3,))
""",
    "jax.lax: control flow and transformations": """
lax.cond (b[0, 0], jnp.sin, jnp.cos, x) | lax.switch (i[0, 0] % 3, [jnp.sin, jnp.cos, jnp.tanh], x)
lax.while_loop (lambda t: t[0] < 5, lambda t: (t[0] + 1, t[1] * 1.1), (i[0, 0], x))
lax.fori_loop (0, i[0, 0], lambda n, t: t * 1.1 + n, x) | lax.scan (lambda t, n: (t + n, t * n), v, x)
lax.map (jnp.linalg.det, jnp.stack([x, y, s])) | lax.associative_scan (jnp.add, x)
lax.custom_root (lambda t: t**2 - v, v, lambda f, t: lax.fori_loop(0, 20, lambda _, t: t - f(t) / (2 * t), \
t), lambda g, y: y / g(jnp.ones_like(y)))
lax.custom_linear_solve: lax.custom_linear_solve(lambda t: s @ t, v, lambda f, t: jnp.linalg.solve(s, t), \
symmetric=True)
lax.platform_dependent (x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tanh)
jax.vmap: jax.vmap(lambda a, t: a @ t)(x, y) | jax.grad: jax.grad(lambda t: jnp.linalg.slogdet(t)[1])(s)
jax.value_and_grad: jax.value_and_grad(lambda t: jnp.sum(jnp.tanh(t)))(x)
jax.jacfwd jacrev hessian (lambda t: jnp.sum(jnp.sin(t) ** 2))(v) | jax.jvp (jnp.sin, (x,), (y,))
jax.vjp: jax.vjp(jnp.sin, x)[1](y) | jax.linearize: jax.linearize(jnp.sin, x)[1](y)
jax.jit: jax.jit(lambda t: t + 1)(x)
jax.checkpoint: jax.grad(jax.checkpoint(lambda t: jnp.sum(jnp.sin(jnp.sin(t)))))(x)
jax.custom_jvp: jax.grad(lambda t: jax.nn.relu(t).sum())(x)
jax.custom_vjp: (lambda f: (f.defvjp(lambda t: (t * t, t), lambda r, g: (3 * r * g,)), jax.grad(lambda t: \
f(t).sum())(x))[1])(jax.custom_vjp(lambda t: t * t))
jax.new_ref: (lambda ref: [ref.__setitem__((0,), v), ref[...]][1])(jax.new_ref(x))
""",
    "jax.lax.linalg": """
lax.linalg.cholesky (s) | lax.linalg.eigh: lax.linalg.eigh(s)[1] | lax.linalg.lu qdwh qr (x)
lax.linalg.householder_product (x, v) | lax.linalg.lu_pivots_to_permutation (lax.linalg.lu(x)[1], 4)
lax.linalg.svd (x, compute_uv=False)
lax.linalg.triangular_solve (jnp.linalg.cholesky(s), x, left_side=True, lower=True)
lax.linalg.tridiagonal_solve (v, v + 3, v, x)
""",
    "jax.scipy.linalg": """
scipy.linalg.block_diag (x, y) | scipy.linalg.cho_factor cholesky eigh (s)
scipy.linalg.cho_solve ((jnp.linalg.cholesky(s), True), v) | scipy.linalg.circulant (v)
scipy.linalg.companion fiedler hankel toeplitz fiedler_companion (v) | scipy.linalg.leslie (v, v[:3])
scipy.linalg.convolution_matrix (v, 3)
scipy.linalg.dft hadamard helmert hilbert invhilbert invpascal pascal (4) | scipy.linalg.det (x)
scipy.linalg.expm inv lu lu_factor polar qr (x) | scipy.linalg.svd (x, compute_uv=False)
scipy.linalg.expm_frechet (x, y) | scipy.linalg.eigh_tridiagonal (v, v[:3], eigvals_only=True)
scipy.linalg.lu_solve (scipy.linalg.lu_factor(s), v) | scipy.linalg.solve (s, v)
scipy.linalg.solve_triangular (jnp.linalg.cholesky(s), v, lower=True)
""",
    "jax.scipy.special": """
scipy.special.bessel_jn (v, v=2) | scipy.special.bernoulli (5)
scipy.special.beta betaln boxcox boxcox1p comb gammainc gammaincc kl_div poch rel_entr xlog1py xlogy owens_t \
(x, y)
scipy.special.betainc (x, y, x)
scipy.special.dawsn digamma entr erf erfc erfcx erfinv exp1 expi expit factorial fresnel gamma gammaln \
gammasgn i0 i0e i1 i1e log_ndtr log_softmax loggamma logit logsumexp ndtr ndtri sici softmax spence (x)
scipy.special.wofz (c) | scipy.special.expn (3, x) | scipy.special.hyp1f1 (x, y, x)
scipy.special.hyp2f1 (x, y, x, y) | scipy.special.multigammaln (x + 3, 2) | scipy.special.polygamma (2, x)
scipy.special.zeta (x + 2, y) | scipy.special.sph_harm_y (i[0] % 3, j[0] % 3 * 0, v, v, n_max=3)
""",
    "jax.scipy.stats": """
stats.bernoulli.cdf logpmf pmf ppf (b, x) | stats.beta.cdf logcdf logpdf logsf pdf sf (x, 2.0, 3.0)
stats.betabinom.logpmf pmf (i, 9, x, y) | stats.binom.logpmf pmf (i, 9, x)
stats.cauchy.cdf isf logcdf logpdf logsf pdf ppf sf (x) | stats.chi2.cdf logcdf logpdf logsf pdf sf (x, 3.0)
stats.dirichlet.logpdf pdf (v[:3] / v[:3].sum(), v[:3]) | stats.expon.cdf logcdf logpdf logsf pdf ppf sf (x)
stats.gamma.cdf logcdf logpdf logsf pdf sf (x, 2.0) | stats.gennorm.cdf logpdf pdf (x, 2.0)
stats.geom.logpmf pmf (i, x) | stats.gumbel_l.cdf logcdf logpdf logsf pdf ppf sf (x)
stats.gumbel_r.cdf logcdf logpdf logsf pdf ppf sf (x) | stats.laplace.cdf logpdf pdf (x)
stats.logistic.cdf isf logpdf pdf ppf sf (x) | stats.multinomial.logpmf pmf (i[0], i[0].sum(), v / v.sum())
stats.multivariate_normal.logpdf pdf (x, v, s) | stats.nbinom.logpmf pmf (i, 3, x)
stats.norm.cdf isf logcdf logpdf logsf pdf ppf sf (x)
stats.pareto.cdf logcdf logpdf logsf pdf ppf sf (x, 2.0) | stats.poisson.cdf logpmf pmf (i, x)
stats.t.logpdf pdf (x, 3.0) | stats.truncnorm.cdf logcdf logpdf logsf pdf sf (x, -1.0, 1.0)
stats.uniform.cdf logpdf pdf ppf (x) | stats.vonmises.logpdf pdf (x, 2.0)
stats.wrapcauchy.logpdf pdf (x, 0.5) | stats.gaussian_kde: stats.gaussian_kde(x.ravel())(v)
stats.mode rankdata (i) | stats.sem (x)
""",
    "jax.scipy: signal, fft and the rest": """
scipy.signal.convolve correlate convolve2d correlate2d fftconvolve (x, y) | scipy.signal.detrend (x)
scipy.signal.csd (image.ravel(), image.ravel(), nperseg=16) | scipy.signal.stft (image.ravel(), nperseg=16)
scipy.signal.istft (scipy.signal.stft(image.ravel(), nperseg=16)[2], nperseg=16)
scipy.signal.welch (image.ravel(), nperseg=16) | scipy.fft.dct dctn idct idctn (x)
scipy.integrate.trapezoid (x)
scipy.interpolate.RegularGridInterpolator: scipy.interpolate.RegularGridInterpolator((v, v), x)(y[:, :2])
scipy.ndimage.map_coordinates (x, [3 * v, v], order=1)
scipy.optimize.minimize: scipy.optimize.minimize(lambda t: jnp.sum((t - v) ** 2), jnp.zeros(4), \
method="BFGS").x
scipy.sparse.linalg.bicgstab: scipy.sparse.linalg.bicgstab(s, v)[0]
scipy.sparse.linalg.cg: scipy.sparse.linalg.cg(s, v)[0]
scipy.sparse.linalg.gmres: scipy.sparse.linalg.gmres(s, v)[0]
scipy.spatial.transform.Rotation: scipy.spatial.transform.Rotation.from_quat(v).as_matrix()
scipy.cluster.vq.vq (x, y) | jax.image.resize (image, (1, 5, 11, 2), "bilinear")
jax.image.scale_and_translate (x, (6, 6), (0, 1), v[:2], v[2:], "linear")
jax.ops.segment_max segment_min segment_prod segment_sum (v, jnp.array([0, 0, 1, 2]), 3)
""",
    "jax.random": """
random.bits gumbel normal uniform (k, shape=(3,)) | random.bernoulli (k, x) | random.categorical (k, x)
random.choice (k, v, (3,)) | random.fold_in: random.key_data(random.fold_in(random.wrap_key_data(k), i[0, 0]))
random.key: random.key_data(random.key(7)) + k | random.permutation (k, v)
random.randint (k, (3,), 0, i[0, 0]) | random.split (k, 3) | random.truncated_normal (k, -1.0, 1.0, (3,))
random.wrap_key_data: random.normal(random.wrap_key_data(k), (3,))
""",
    "jax.random: other distributions": """
random.cauchy exponential laplace logistic lognormal maxwell rademacher (k, shape=(3,)) | random.ball (k, 3)
random.beta (k, x, y) | random.binomial (k, 9.0, x) | random.chisquare (k, x) | random.dirichlet (k, v)
random.double_sided_maxwell (k, 0.5, 2.0, (3,)) | random.f (k, x, y) | random.gamma (k, x)
random.generalized_normal (k, 2.0, (3,)) | random.geometric (k, x) | random.loggamma (k, x)
random.multinomial (k, 9, v / v.sum()) | random.multivariate_normal (k, v, s) | random.orthogonal (k, 3)
random.pareto (k, x) | random.poisson (k, x) | random.rayleigh (k, x) | random.t (k, x)
random.triangular (k, 0.0, 0.5, 1.0, (3,)) | random.wald (k, x) | random.weibull_min (k, 1.0, 2.0, (3,))
""",
    "jax.nn": """
nn.celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid log_softmax \
logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus sparse_sigmoid \
squareplus standardize swish tanh glu (x)
nn.log1mexp (x) | nn.one_hot (i, 8) | nn.dot_product_attention (image, image, image, is_causal=True)
nn.initializers.glorot_normal glorot_uniform he_normal he_uniform lecun_normal lecun_uniform ()(k, (4, 4))
nn.initializers.constant: nn.initializers.constant(3.0)(k, (2,))
nn.initializers.delta_orthogonal: nn.initializers.delta_orthogonal()(k, (3, 3, 2, 4))
nn.initializers.normal orthogonal truncated_normal uniform ()(k, (4, 4))
nn.initializers.variance_scaling: nn.initializers.variance_scaling(1.0, "fan_in", "normal")(k, (4, 4))
""",
    "flax.linen": """
linen.Dense DenseGeneral (3) @ x | linen.Dropout (0.5, deterministic=True) @ x
linen.LayerNorm RMSNorm PReLU () @ x | linen.BatchNorm (use_running_average=True) @ x
linen.GroupNorm: apply(linen.GroupNorm(num_groups=2), image) | linen.InstanceNorm () @ image
linen.Conv ConvTranspose ConvLocal (5, (3, 3)) @ image | linen.Embed (9, 3) @ i
linen.Einsum ((4, 3), "ab,bc->ac") @ x
linen.MultiHeadDotProductAttention: apply(linen.MultiHeadDotProductAttention(2), x[None])
linen.MultiHeadAttention (2) @ x[None] | linen.Sequential ([linen.Dense(3), jnp.tanh, linen.Dense(2)]) @ x
linen.avg_pool max_pool (image, (2, 2)) | linen.dot_product_attention (image, image, image)
linen.make_causal_mask (x)
""",
    "flax.nnx": """
nnx.Linear (4, 3, rngs=rngs()) @ x | nnx.LinearGeneral (4, (2, 3), rngs=rngs()) @ x
nnx.LoRA (4, 2, 3, rngs=rngs()) @ x | nnx.Einsum ("ab,bc->ac", (4, 3), rngs=rngs()) @ x
nnx.Conv ConvTranspose (2, 5, (3, 3), rngs=rngs()) @ image | nnx.Embed (9, 3, rngs=rngs()) @ i
nnx.LayerNorm RMSNorm (4, rngs=rngs()) @ x | nnx.BatchNorm (4, use_running_average=True, rngs=rngs()) @ x
nnx.GroupNorm (2, num_groups=2, rngs=rngs()) @ image | nnx.InstanceNorm (2, rngs=rngs()) @ image
nnx.Dropout (0.5, deterministic=True) @ x | nnx.PReLU () @ x
nnx.MultiHeadAttention (2, 4, rngs=rngs(), decode=False) @ x[None]
nnx.Sequential (nnx.Linear(4, 3, rngs=rngs()), jnp.tanh, nnx.Linear(3, 2, rngs=rngs())) @ x
nnx.avg_pool max_pool min_pool (image, (2, 2)) | nnx.dot_product_attention (image, image, image)
nnx.scan: nnx.scan(lambda t, n: (t + n, t), in_axes=(nnx.Carry, 0))(v, x)
nnx.value_and_grad: nnx.value_and_grad(lambda m: m(x).sum())(nnx.Linear(4, 3, rngs=rngs()))[0]
""",
    "flax: recurrent layers": """
linen.LSTMCell: apply_cell(linen.LSTMCell(3), x) | linen.GRUCell: apply_cell(linen.GRUCell(3), x)
linen.MGUCell: apply_cell(linen.MGUCell(3), x)
linen.OptimizedLSTMCell: apply_cell(linen.OptimizedLSTMCell(3), x)
linen.SimpleCell: apply_cell(linen.SimpleCell(3), x) | linen.RNN: apply(linen.RNN(linen.GRUCell(3)), x[None])
linen.Bidirectional: apply(linen.Bidirectional(linen.RNN(linen.GRUCell(3)), linen.RNN(linen.GRUCell(3))), \
x[None])
nnx.RNN (nnx.GRUCell(4, 3, rngs=rngs()), rngs=rngs()) @ x[None]
nnx.LSTMCell: nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs()), rngs=rngs())(x[None])
nnx.SimpleCell: nnx.RNN(nnx.SimpleCell(4, 3, rngs=rngs()), rngs=rngs())(x[None])
""",
}


def _family(text):
    """The expressions of a family, by the name of what they try."""
    functions = {}
    for entry in re.split(r"\n| \| ", text.strip()):
        head, colon, expression = entry.partition(": ")
        if colon and " " not in head:
            functions[head] = expression
            continue
        names, arguments = entry.split(" (", 1)
        first, *others = names.split()
        prefix = first[: first.rindex(".") + 1]
        called, at, given = f"({arguments}".partition(" @ ")
        for name in (first, *(prefix + other for other in others)):
            functions[name] = f"apply({name}{called}, {given})" if at else f"{name}{called}"
    return functions


FAMILIES = {name: _family(text) for name, text in _TABLE.items()}
"""By family: what is tried, by name, and the expression that tries it."""

SAMPLE = ("jax.numpy.linalg", "jax.lax: control flow and transformations")
"""Families that bring something of their own to a program: a library's kernels, loops.

Others differ in the operations alone.
"""

SOME_PLATFORMS = {
    name: (expression, tuple(platforms.split()))
    for line in """
jnp.linalg.eig: jnp.abs(jnp.linalg.eig(x)[0]) | cpu
jnp.linalg.eigvals: jnp.sort_complex(jnp.linalg.eigvals(x)) | cpu
jnp.roots: jnp.sort_complex(jnp.roots(v, strip_zeros=False)) | cpu
lax.linalg.eig: jnp.sort_complex(lax.linalg.eig(x)[0]) | cpu
lax.linalg.tridiagonal: lax.linalg.tridiagonal(s) | cpu cuda
lax.linalg.cholesky_update: lax.linalg.cholesky_update(jnp.linalg.cholesky(s).T, v) | cpu tpu
lax.linalg.symmetric_product: lax.linalg.symmetric_product(x, s) | cpu tpu
lax.linalg.hessenberg: lax.linalg.hessenberg(x) | cpu
lax.linalg.schur: lax.linalg.schur(x) | cpu
scipy.linalg.funm: scipy.linalg.funm(s, jnp.sin) | cpu
scipy.linalg.hessenberg: scipy.linalg.hessenberg(x) | cpu
scipy.linalg.rsf2csf: scipy.linalg.rsf2csf(*scipy.linalg.schur(x))[0] | cpu
scipy.linalg.schur: scipy.linalg.schur(x) | cpu
scipy.linalg.solve_sylvester: scipy.linalg.solve_sylvester(s, s, x) | cpu
scipy.linalg.sqrtm: scipy.linalg.sqrtm(s) | cpu
""".strip().splitlines()
    for name, expression, platforms in [re.split(": | \\| ", line)]
}
"""What jax does not lower for every platform: the expression, and platforms that a bundle has it for."""

REFUSED = {
    name: (expression, message, instead)
    for line in """
jax.debug.print | jax.debug.print("{}", x) or x | found jax.debug.print | return the values and print them
jax.debug.callback | jax.debug.callback(print, x) or x | found jax.debug.callback | return the values
jax.pure_callback | jax.pure_callback(np.sin, x, x) | found jax.pure_callback | write it in JAX, or split the function in two programs
jax.experimental.io_callback | io_callback(np.sin, x, x) | found jax.experimental.io_callback | do it after the call
pallas_call, for a CPU | pl.pallas_call(lambda a, o: o.__setitem__(..., a[...]), x)(x) | for cpu: ValueError: Only interpret mode | `interpret=True`, or targets that are no CPU
nn.scaled_matmul, for a CPU, before jax 0.12 | nn.scaled_matmul(*[jnp.ones((1, 8, 32), jnp.float8_e4m3fn)] * 2, *[jnp.ones((1, 8, 1), jnp.float8_e8m0fnu)] * 2) | for cpu: NotImplementedError | targets that are NVIDIA GPUs
lax.linalg.ormqr | lax.linalg.ormqr(*jnp.linalg.qr(x, mode="raw"), y) | lapack_sormqr_ffi | `lax.linalg.householder_product`, and multiply
scipy.linalg.qr_multiply | scipy.linalg.qr_multiply(x, y) | lapack_sormqr_ffi | `scipy.linalg.qr`, and multiply
jnp.nonzero and its kin without `size` | jnp.nonzero(b) | ConcretizationTypeError | give `size=`, as under `jax.jit`
`if` on values of an array | x if x[0, 0] > 0 else y | TracerBoolConversionError | `jnp.where` or `lax.cond`, as under `jax.jit`
lax.psum and other collectives, alone | lax.psum(x, "i") | unbound axis name | inside `jax.shard_map`, with a `[mesh]`
jax.ffi.ffi_call of a library of your own | jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct((4, 4), jnp.float32))(x) | it calls mine, which | [name the library](../how-to/own-library.md) in the manifest, which then works for CPUs
a dict whose keys are neither texts nor integers | {(0, 1): x} | expected dicts whose keys are texts or integers, found the key (0, 1) | return a list, or a dict with other keys
""".strip().splitlines()
    for name, expression, message, instead in [line.split(" | ")]
}
"""What no bundle for a CPU can hold: the expression, what the build says, and what to do."""


def tables():
    """The tables of docs/reference/jax-coverage.md."""
    counts = {name: len(functions) for name, functions in FAMILIES.items()}
    counts["all"] = sum(counts.values())
    rows = [f"| {name} | {count} |" for name, count in counts.items()]
    some = [f"| `{name}` | {', '.join(on)} |" for name, (_, on) in SOME_PLATFORMS.items()]
    refused = [
        f"| {name if ' ' in name else f'`{name}`'} | {instead} |"
        for name, (_, _, instead) in REFUSED.items()
    ]
    heads = ("| family | functions tried |", "| function | platforms |", "| what | instead |")
    found = zip(heads, (rows, some, refused), strict=True)
    return ["\n".join((head, "| --- | --- |", *lines, "")) for head, lines in found]


if __name__ == "__main__":
    print("\n".join(tables()), end="")
