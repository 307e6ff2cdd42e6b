"""Checks queries for `/metrics`: Grafana's dashboard, the endpoint picker of Kubernetes' Gateway API Inference
Extension, and the names in docs/scaling.md. Each query is parsed and compared with the metrics of a running server:
names, types, labels and their values. In the manifest for Kubernetes, all references must resolve.
"""

import json
import re

from server import ROOT, get, post, scrape

try:
    import promql_parser as promql
    import yaml
    from prometheus_client.parser import text_string_to_metric_families
except ImportError:
    promql = None

DASHBOARD = ROOT / "config/grafana/unicorn.json"
POOL = ROOT / "config/scaling/inference-pool.yaml"
PAGE = ROOT / "docs/scaling.md"
# Labels that Prometheus adds to scraped samples.
ADDED = {"instance", "job"}
# Variables that Grafana replaces by a time.
TIMES = {"$__rate_interval": "5m"}
OF_COUNTERS = {"rate", "irate", "increase"}


class Refused(Exception):
    """Why the server cannot answer a query."""


class Metrics:
    """The samples of a scrape by name: the type of the family, and the values of each label."""

    def __init__(self, text):
        self.kinds, self.labels = {}, {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.kinds[sample.name] = "counter" if family.type in ("counter", "histogram") else family.type
                for label, value in sample.labels.items():
                    self.labels.setdefault(sample.name, {}).setdefault(label, set()).add(value)

    def check(self, query):
        """The labels of the query's result. None = a number, which has no labels. Raises Refused."""
        try:
            expression = promql.parse(query)
        except ValueError as error:
            raise Refused(f"no PromQL: {error}") from None
        return self.result(expression)

    def result(self, node):
        if isinstance(node, promql.VectorSelector):
            return self.select(node)
        if isinstance(node, promql.MatrixSelector):
            return self.select(node.vector_selector)
        if isinstance(node, promql.Call):
            return self.call(node)
        if isinstance(node, promql.AggregateExpr):
            return self.aggregate(node)
        if isinstance(node, promql.BinaryExpr):
            return self.combine(node)
        if isinstance(node, (promql.ParenExpr, promql.UnaryExpr)):
            return self.result(node.expr)
        if isinstance(node, (promql.NumberLiteral, promql.StringLiteral)):
            return None
        raise Refused(f"{type(node).__name__} is not supported by this check")

    def select(self, node):
        known = self.labels.get(node.name)
        if known is None:
            raise Refused(f"no metric {node.name}")
        for matcher in node.matchers.matchers:
            if matcher.name not in known.keys() | ADDED:
                raise Refused(f"{node.name} has no label {matcher.name}")
            # A pattern may match something that has not happened yet, such as a failure.
            if matcher.op == promql.MatchOp.Equal and matcher.value not in known.get(matcher.name, ()):
                raise Refused(f"{node.name} has no {matcher.name}={matcher.value!r}")
        return known.keys() | ADDED

    def call(self, node):
        results = [result for result in map(self.result, node.args) if result is not None]
        if node.func.name in OF_COUNTERS:
            name = node.args[0].vector_selector.name
            if self.kinds[name] != "counter":
                raise Refused(f"{node.func.name} of {name}, which is not a counter")
        if node.func.name == "histogram_quantile":
            if "le" not in results[0]:
                raise Refused("histogram_quantile without le")
            return results[0] - {"le"}
        return results[0] if results else None

    def aggregate(self, node):
        inner, modifier = self.result(node.expr), node.modifier
        if modifier is None:
            return set()
        named = set(modifier.labels)
        if named - inner:
            raise Refused(f"no label {', '.join(sorted(named - inner))} to group by")
        return named if modifier.type == promql.AggModifierType.By else inner - named

    def combine(self, node):
        left, right = self.result(node.lhs), self.result(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        if node.modifier is not None and node.modifier.matching is not None:
            raise Refused("this check does not support on() and ignoring()")
        if left != right:
            raise Refused(f"nothing matches: {sorted(left)} and {sorted(right)}")
        return left


def scraped(server):
    """The text of /metrics after an answer and a refusal, because samples with a reason appear only after their first
    use."""
    for body, status in [({"prompt": "Hello", "max_tokens": 2}, 200), ({"prompt": "Hello", "model": "none"}, 404)]:
        assert post(server.url + "/v1/completions", body)[0] == status
    return Metrics(scrape(server))


def problems(queries, metrics):
    """The problems of queries: (where, query, legend)."""
    found = []
    for where, query, legend in queries:
        for name, time in TIMES.items():
            query = query.replace(name, time)
        try:
            labels = metrics.check(query) or set()
            shown = set(re.findall(r"{{\s*(\w+)\s*}}", legend))
            if shown - labels:
                raise Refused(f"its legend shows {', '.join(sorted(shown - labels))}, which the result does not have")
        except Refused as why:
            found.append(f"{where}: {why}: {query}")
    return found


# --- the dashboard --------------------------------------------------------------------------------------


def queries_of(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
            yield f"${variable['name']}", f"sum by ({label}) ({selector})", f"{{{{{label}}}}}"


def the_dashboard_queries_existing_metrics(server):
    dashboard = json.loads(DASHBOARD.read_text())
    queries = list(queries_of(dashboard))
    lacking = problems(queries, scraped(server))
    assert not lacking, lacking
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 10 and all(panel["targets"] and panel["description"] for panel in panels), len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    asked = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard)))
    assert asked == variables, f"variables {variables}, of which {asked} are used"


def panels_do_not_overlap(server):
    """Panels do not overlap, stay inside the grid, and have different ids."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for cell in [(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]:
            assert cell not in taken, f"{panel['title']} overlaps {taken[cell]}"
            taken[cell] = panel["title"]


# --- Kubernetes -----------------------------------------------------------------------------------------


def manifest():
    """The objects of the manifest, by kind and name."""
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(POOL.read_text())}


def picker_config(objects):
    return yaml.safe_load(objects["ConfigMap", "unicorn-epp"]["data"]["plugins.yaml"])


def the_endpoint_picker_queries_existing_metrics(server):
    plugins = {plugin["type"]: plugin for plugin in picker_config(manifest())["plugins"]}
    assert plugins["metrics-data-source"]["parameters"]["path"] == "/metrics"
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    specs = [(name, spec, "") for name, spec in engine.items() if name.endswith("Spec")]
    assert {name for name, _, _ in specs} == {"queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"}
    metrics = scraped(server)
    lacking = problems(specs, metrics)
    assert not lacking, lacking
    for name, spec, _ in specs:
        selector = promql.parse(spec)
        # The picker uses one sample, so the labels must leave exactly one.
        left = metrics.labels[selector.name].keys() - {matcher.name for matcher in selector.matchers.matchers} - {"model_name"}
        assert isinstance(selector, promql.VectorSelector) and metrics.kinds[selector.name] == "gauge" and not left, (name, left)


def references_in_the_manifest_resolve(server):
    objects = manifest()
    assert [item["apiVersion"] for (kind, _), item in objects.items() if kind == "InferencePool"] == ["inference.networking.k8s.io/v1"]
    pool, pods = objects["InferencePool", "unicorn"]["spec"], objects["Deployment", "unicorn"]["spec"]
    assert set(pool) == {"selector", "targetPorts", "endpointPickerRef"} and set(pool["selector"]) == {"matchLabels"}, pool
    labels, (container,) = pods["template"]["metadata"]["labels"], pods["template"]["spec"]["containers"]
    assert pool["selector"]["matchLabels"].items() <= labels.items() and pods["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in pool["targetPorts"]] == [port["containerPort"] for port in container["ports"]]

    picker = pool["endpointPickerRef"]
    assert set(picker) <= {"group", "kind", "name", "port", "failureMode"} and picker["failureMode"] in ("FailOpen", "FailClose")
    service, deployment = objects["Service", picker["name"]]["spec"], objects["Deployment", picker["name"]]["spec"]["template"]
    assert [port["port"] for port in service["ports"]] == [picker["port"]["number"]]
    assert service["selector"].items() <= deployment["metadata"]["labels"].items()
    (epp,) = deployment["spec"]["containers"]
    assert picker["port"]["number"] in [port["containerPort"] for port in epp["ports"]]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in epp["args"])
    assert flags["pool-name"] == "unicorn" and flags["pool-group"] == "inference.networking.k8s.io", flags
    folder, file = flags["config-file"].rsplit("/", 1)
    (volume,), (mount,) = deployment["spec"]["volumes"], epp["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": folder} and file in objects["ConfigMap", volume["configMap"]["name"]]["data"]

    account = deployment["spec"]["serviceAccountName"]
    assert ("ServiceAccount", account) in objects
    binding = objects["RoleBinding", account]
    assert [subject["name"] for subject in binding["subjects"]] == [account] and ("Role", binding["roleRef"]["name"]) in objects
    (backend,) = objects["HTTPRoute", "unicorn"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) in objects

    config = picker_config(objects)
    plugins = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= plugins
    extractor = next(plugin["parameters"] for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor")
    assert extractor["defaultEngine"] == labels["llm-d.ai/engine-type"] == extractor["engineConfigs"][0]["name"]


def pods_use_existing_options_and_probes(server):
    """The options of the pods exist, and the probes use a route that answers."""
    (container,) = manifest()["Deployment", "unicorn"]["spec"]["template"]["spec"]["containers"]
    options = (ROOT / "config/default.toml").read_text()
    server_section = options.split("[server]", 1)[1].split("\n[", 1)[0]
    for variable in container["env"]:
        name = variable["name"].removeprefix("UNICORN_SERVER_").lower()
        assert re.search(rf"^{name} = ", server_section, re.MULTILINE), variable
    assert f"\nport = {container['ports'][0]['containerPort']}\n" in server_section
    for probe, wanted in [("startupProbe", "/health"), ("readinessProbe", "/health"), ("livenessProbe", "/live")]:
        path = container[probe]["httpGet"]["path"]
        assert path == wanted, probe
        assert get(server.url + path)[0] == 200, path


# --- the page, and the check itself ---------------------------------------------------------------------


def docs_scaling_md_names_metrics_of_the_server(server):
    named = set(re.findall(r"\bunicorn_[a-z_]+\b", PAGE.read_text()))
    metrics = scraped(server)
    assert named and named <= metrics.labels.keys(), named - metrics.labels.keys()


SAMPLES = """\
# TYPE a_total counter
a_total{model_name="m",status="200"} 1
# TYPE b gauge
b{model_name="m",pool="full"} 1
# TYPE c histogram
c_bucket{model_name="m",le="+Inf"} 1
c_sum{model_name="m"} 1
c_count{model_name="m"} 1
"""


def a_query_for_missing_metrics_is_refused(server):
    metrics = Metrics(SAMPLES)
    good = [
        ("rate(a_total[$__rate_interval])", "{{status}} {{instance}}"), ('sum by (status) (increase(a_total{status=~"5.."}[5m]))', "{{status}}"),
        ('b{pool="full", model_name=~"$model"}', "{{pool}}"), ("histogram_quantile(0.9, sum by (le) (rate(c_bucket[5m])))", ""),
        ("sum(rate(c_sum[5m])) / sum(rate(c_count[5m]))", ""), ("time() - b", "{{pool}}"), ("sum without (pool) (b)", "{{model_name}}"),
    ]
    assert problems([("good", *query) for query in good], metrics) == []
    for query, legend in [
        ("nothing", ""), ("a", ""), ('b{state="held"}', ""), ('b{pool="sliding"}', ""), ('a_total{statuses=~"5.."}', ""), ("c", ""),
        ("rate(b[5m])", ""), ("sum by (pool) (a_total)", ""), ("sum(b)", "{{pool}}"), ("sum by (status) (a_total) / sum(b)", ""),
        ("histogram_quantile(0.9, sum(rate(c_bucket[5m])))", ""), ("rate(a_total[5m]", ""), ("rate(a_total)", ""), ("a_total / on(status) b", ""),
    ]:
        assert len(problems([("bad", query, legend)], metrics)) == 1, query


TESTS = [
    the_dashboard_queries_existing_metrics,
    panels_do_not_overlap,
    the_endpoint_picker_queries_existing_metrics,
    references_in_the_manifest_resolve,
    pods_use_existing_options_and_probes,
    docs_scaling_md_names_metrics_of_the_server,
    a_query_for_missing_metrics_is_refused,
]
