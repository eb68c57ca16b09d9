"""An API server of Kubernetes in this process, with as much as Helm needs to install a chart."""

import json
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

from tests.http_serving import QuietHandler, serving

RESOURCES = {
    "v1": {"services": "Service", "secrets": "Secret"},
    "apps/v1": {"deployments": "Deployment", "daemonsets": "DaemonSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
}
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: fake, cluster: {server: "http://%s"}}]
users: [{name: fake, user: {}}]
contexts: [{name: fake, context: {cluster: fake, user: fake}}]
current-context: fake
"""


def _discovery():
    groups = []
    found = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for version, kinds in RESOURCES.items():
        group, _, number = version.rpartition("/")
        if group:
            one = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [one], "preferredVersion": one})
        verbs = ["create", "delete", "get", "list", "patch", "update"]
        described = [
            {"name": plural, "singularName": "", "kind": kind, "namespaced": True, "verbs": verbs}
            for plural, kind in kinds.items()
        ]
        found[f"/{'apis' if group else 'api'}/{version}"] = {
            **{"kind": "APIResourceList", "apiVersion": "v1"},
            **{"groupVersion": version, "resources": described},
        }
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


@contextmanager
def fake_kubernetes():
    api = SimpleNamespace(kubeconfig="", objects={})  # what clients created, by its path
    known = _discovery()

    class Handler(QuietHandler):
        def do_GET(self):
            path = urlsplit(self.path).path
            found = known.get(path) or api.objects.get(path)
            if found is None and path.endswith("/secrets"):  # no release is there yet
                found = {"kind": "SecretList", "apiVersion": "v1", "items": []}
            if found is None:
                missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
                self.answer(404, missing | {"reason": "NotFound", "code": 404})
            else:
                self.answer(200, found)

        def do_POST(self):
            content, kind = self.content(), self.headers["content-type"]
            if kind == "application/json":
                created = json.loads(content)
                api.objects[f"{urlsplit(self.path).path}/{created['metadata']['name']}"] = created
            self.reply(201, content, content_type=kind)

        def do_PUT(self):  # Helm writes again what it keeps of a release
            self.reply(200, self.content(), content_type=self.headers["content-type"])

        def answer(self, status, content):
            self.reply(status, json.dumps(content).encode(), content_type="application/json")

    with serving(Handler) as place:
        api.kubeconfig = KUBECONFIG % place
        yield api
