"""The way into verl by environment alone.

::

    VERL_USE_EXTERNAL_MODULES=dataproto_audit.verl_plugin python -m verl.trainer.main_ppo ...

verl imports this module in every process, Ray workers included; it waits there for the trainer
class and does nothing else. verl 0.9 also finds it through the entry point ``verl.plugins``, in
every environment where this package is installed: then it does nothing unless ``DATAPROTO_AUDIT``
is set (``DATAPROTO_AUDIT=1``). ``DATAPROTO_AUDIT=0`` switches both ways off.

Settings are variables ``DATAPROTO_AUDIT_*`` (:mod:`dataproto_audit.integrations.options`). On
several nodes these variables belong into Ray's ``runtime_env``, and the package on every node. Ray
takes text only, so that numbers and switches are quoted for hydra and for the shell::

    '+ray_kwargs.ray_init.runtime_env.env_vars.DATAPROTO_AUDIT="1"'
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("dataproto_audit")

ASKED_FOR = "VERL_USE_EXTERNAL_MODULES"


def activate() -> bool:
    """Wait for verl's trainer if the environment asks for it; never raises."""
    try:
        from dataproto_audit.integrations.options import switched_on

        wanted = switched_on()
        if wanted is None:
            wanted = __name__ in os.environ.get(ASKED_FOR, "").split(",")
        if not wanted:
            return False
        from dataproto_audit.integrations.attach import attach

        attach()
    except Exception as error:  # noqa: BLE001 - verl must start whatever is wrong here
        log.error("dataproto-audit is not attached: %s", error)
        return False
    return True


active = activate()
