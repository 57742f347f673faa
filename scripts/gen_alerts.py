"""Write the alerts of deploy/monitoring/alerts.yaml as a PrometheusRule of Kubernetes.

python scripts/gen_alerts.py
"""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
RULES = DEPLOY / "monitoring" / "alerts.yaml"
MANIFEST = DEPLOY / "k8s" / "components" / "monitoring" / "prometheus-rule.yaml"
_HEAD = """# Made from deploy/monitoring/alerts.yaml by `python scripts/gen_alerts.py`; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: slipstream
spec:
"""


def render() -> str:
    """The manifest: the rules as they are, without their first comment, below `spec`."""
    rules = RULES.read_text()
    body = rules[rules.index("groups:") :]
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in body.splitlines(keepends=True))


if __name__ == "__main__":
    MANIFEST.write_text(render())
