"""The environment server Gym 0.7 asks for: relays /run to `polar_agent`, without joining Ray."""

from environment_servers.legacy_agent.app import LegacyAgentEnvironmentServer


class PolarEnvironmentServer(LegacyAgentEnvironmentServer):
    """Gym's relay, with ``ray_enabled`` said (Gym's own does not declare it and would join Ray)."""

    ray_enabled = False
