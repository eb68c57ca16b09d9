"""Simulate four legs on a floor with MJX: single steps, then a batch of rollouts, after its tutorial."""

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx

LEG = """<body pos="{x} {y} -0.05"><joint name="hip{n}" axis="0 1 0" range="-60 60"/>
<geom type="capsule" fromto="0 0 0 0 0 -0.2" size="0.03"/>
<body pos="0 0 -0.2"><joint name="knee{n}" axis="0 1 0" range="-90 0"/>
<geom type="capsule" fromto="0 0 0 0.05 0 -0.2" size="0.025"/></body></body>"""
PLACES = [(0.2, 0.1), (0.2, -0.1), (-0.2, 0.1), (-0.2, -0.1)]
LEGS = "".join(LEG.format(x=x, y=y, n=n) for n, (x, y) in enumerate(PLACES))
MOTORS = "".join(
    f'<motor joint="{part}{n}" gear="8"/>' for n in range(4) for part in ("hip", "knee")
)
XML = f"""<mujoco><option timestep="0.004" iterations="4" ls_iterations="4"/>
<default><geom contype="0" conaffinity="1"/></default>
<worldbody><geom type="plane" size="5 5 1" contype="1" conaffinity="0"/>
<body pos="0 0 0.45"><freejoint/><geom type="box" size="0.25 0.12 0.05" mass="5"/>{LEGS}</body></worldbody>
<actuator>{MOTORS}</actuator></mujoco>"""

model = mjx.put_model(mujoco.MjModel.from_xml_string(XML))
step = jax.jit(mjx.step)


@jax.jit
@jax.vmap
def rollout(key):
    def act(data, key):
        data = mjx.step(model, data.replace(ctrl=jax.random.uniform(key, (model.nu,), minval=-1)))
        return data, data.qpos[2]

    return jax.lax.scan(act, mjx.make_data(model), jax.random.split(key, 10))[1]


data = mjx.make_data(model)
for _ in range(5):
    data = step(model, data.replace(ctrl=jnp.full(model.nu, 0.1)))
print(data.qpos.tolist(), data.qvel.tolist())
print(rollout(jax.random.split(jax.random.key(0), 4)).tolist())
