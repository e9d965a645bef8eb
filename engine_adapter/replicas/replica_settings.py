"""How many replicas there are, what each may use, and how long anything may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tokenplane.engine_adapter.config_errors import LONGEST_TIMEOUT_S


class ReplicaSettings(BaseModel):
    """Frozen; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    replicas: int = Field(default=2, ge=1)
    """Workers, each an actor with an engine of its own."""
    host: str = "127.0.0.1"
    """Address of the one base URL; other hosts than loopback need a control token."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    ray_address: str = "local"
    """A Ray cluster to join. ``local`` starts a Ray on loopback that ends with this process."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each worker."""
    gpus_per_replica: float = Field(default=0.0, ge=0)
    """GPUs that Ray gives to each worker."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Model calls at once on each worker; further ones wait in the proxy."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S)
    """Until every worker answers."""
    drain_timeout_s: float = Field(default=30.0, gt=0, le=LONGEST_TIMEOUT_S)
    """How long running calls may go on when everything stops."""
    stop_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_TIMEOUT_S)
    """For Serve and Ray to end, after the drain."""
    health_period_s: float = Field(default=2.0, gt=0, le=LONGEST_TIMEOUT_S)
    """How often Serve looks whether a worker lives; one that does not is started again."""
    health_timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_TIMEOUT_S)
    """A worker that does not answer Serve for so long is taken for dead."""
