//! Compares `docs/api.md` with `/openapi.json` in both directions. Every route has a row in a table of routes, and
//! every field of a body or query has a row with its type, its bounds, and whether it is required. Only the page has
//! defaults and meanings.
//!
//! A table of routes has the heading `route` over its first column. A table of fields has the heading `field` there,
//! and the paragraph "Fields of `POST /a`, `POST /b`:" above it. A route may have several tables. The name of a field
//! of an inner object is a path: `messages[].content[].text`. If a schema has alternative objects, the page lists the
//! fields of all.
//!
//! A table of other servers' fields has the heading `other field`, and the paragraph "Other fields of `POST /a`:" above
//! it. Its rows are those of the document's `x-other-fields`, which also say why. A row of a table may name several
//! fields that differ in nothing else.

use std::collections::{BTreeMap, BTreeSet};

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use unicorn::api::{AccessPolicy, Keys};

use crate::support::app::app_with_policy;
use crate::support::http::{get, send_json};
use crate::support::root;

const PAGE: &str = "docs/api.md";
const METHODS: [&str; 5] = ["get", "post", "put", "patch", "delete"];
const REQUIRED: &str = "required";

/// The cells of a row in a table of fields that can be compared with a schema.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Field {
    types: BTreeSet<String>,
    bounds: BTreeSet<String>,
    required: bool,
}

impl Field {
    /// The row of a table. `default` and `meaning` are its last two cells.
    fn line(&self, name: &str, default: &str, meaning: &str) -> String {
        let [types, bounds] = [(&self.types, " or "), (&self.bounds, ", ")]
            .map(|(words, between)| words.iter().cloned().collect::<Vec<_>>().join(between));
        let default = match (self.required, default) {
            (true, _) => REQUIRED,
            (false, REQUIRED) => "",
            (false, default) => default,
        };
        written([format!("`{name}`"), types, bounds, default.to_owned(), meaning.to_owned()])
    }
}

/// A row of a table with these cells.
fn written<const N: usize>(cells: [String; N]) -> String {
    cells.iter().fold("|".to_owned(), |line, cell| match cell.as_str() {
        "" => line + " |",
        cell => format!("{line} {cell} |"),
    })
}

/// The fields of each route, by name.
type Routes = BTreeMap<String, BTreeMap<String, Field>>;

// --- the OpenAPI document ---------------------------------------------------------------------------------

fn described(document: &Value) -> Routes {
    let mut routes = Routes::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for method in METHODS.into_iter().filter(|method| item[method].is_object()) {
            let operation = &item[method];
            let fields = routes.entry(format!("{} {path}", method.to_uppercase())).or_default();
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            for parameter in parameters.filter(|parameter| parameter["in"] == "query") {
                let name = parameter["name"].as_str().expect("a name");
                let is_required = parameter["required"] == true;
                fields.insert(name.to_owned(), field(document, &parameter["schema"], is_required));
            }
            let body = &operation["requestBody"]["content"]["application/json"]["schema"];
            if body.is_object() {
                read_fields(document, body, "", fields);
            }
        }
    }
    routes
}

/// The alternatives of a schema, with references resolved. Alternatives for null or for an empty list are left out if
/// there are others.
fn alternatives(document: &Value, schema: &Value) -> Vec<Value> {
    let mut found = Vec::new();
    spread(document, schema, &mut found);
    let is_empty_value = |schema: &Value| schema["type"] == "null" || schema["maxItems"] == 0;
    if !found.iter().all(is_empty_value) {
        found.retain(|schema| !is_empty_value(schema));
    }
    found
}

fn spread(document: &Value, schema: &Value, found: &mut Vec<Value>) {
    if let Some(reference) = schema["$ref"].as_str() {
        return spread(document, document.pointer(&reference[1..]).expect(reference), found);
    }
    let choices = schema["anyOf"].as_array().or(schema["oneOf"].as_array());
    match (choices, schema["allOf"].as_array()) {
        (Some(choices), _) => choices.iter().for_each(|choice| spread(document, choice, found)),
        (None, Some(parts)) => {
            let mut whole = vec![json!({"type": "object", "properties": {}, "required": []})];
            for part in parts {
                let ways = alternatives(document, part);
                whole = whole.iter().flat_map(|so_far| ways.iter().map(|way| merged(so_far, way))).collect();
            }
            found.extend(whole);
        }
        (None, None) => found.push(schema.clone()),
    }
}

/// An object schema with the fields of both.
fn merged(one: &Value, other: &Value) -> Value {
    let mut both = one.clone();
    if let (Some(fields), Some(more)) = (both["properties"].as_object_mut(), other["properties"].as_object())
    {
        fields.extend(more.clone());
    }
    if let (Some(names), Some(more)) = (both["required"].as_array_mut(), other["required"].as_array()) {
        names.extend(more.clone());
    }
    both
}

fn field(document: &Value, schema: &Value, required: bool) -> Field {
    let mut bounds = BTreeSet::new();
    let types = types(document, schema, &mut bounds);
    Field { types, bounds, required }
}

/// The names of a schema's types. The bounds of its values, and of values inside them, are added to `bounds`.
fn types(document: &Value, schema: &Value, bounds: &mut BTreeSet<String>) -> BTreeSet<String> {
    let mut types = BTreeSet::new();
    for schema in alternatives(document, schema) {
        let named = match &schema["type"] {
            Value::Array(several) => several.iter().filter(|name| *name != "null").collect(),
            Value::Null => Vec::new(),
            one => vec![one],
        };
        if named.is_empty() {
            types.insert("any".to_owned());
        }
        for name in named {
            if name == "array" {
                let items = self::types(document, &schema["items"], bounds);
                types.extend(items.into_iter().map(|item| format!("list of {item}")));
            } else {
                types.insert(name.as_str().expect("a type").to_owned());
            }
        }
        let words = schema["enum"].as_array().into_iter().flatten().filter(|word| !word.is_null());
        bounds
            .extend(words.map(|word| format!("`{}`", word.as_str().map_or(word.to_string(), str::to_owned))));
        bounds.extend(range(&schema["minimum"], &schema["maximum"], ""));
        bounds.extend(range(&schema["minLength"], &schema["maxLength"], " character"));
        bounds.extend(range(&schema["minItems"], &schema["maxItems"], " item"));
        if schema["additionalProperties"].is_object() {
            self::types(document, &schema["additionalProperties"], bounds);
        }
    }
    types
}

fn range(least: &Value, most: &Value, unit: &str) -> Option<String> {
    let plain = |number: &Value| match number.as_f64() {
        Some(whole) if number.is_f64() && whole.fract() == 0.0 => format!("{whole:.0}"),
        _ => number.to_string(),
    };
    let (words, last) = match (least, most) {
        (Value::Null, Value::Null) => return None,
        (least, Value::Null) => (format!("at least {}", plain(least)), least),
        (Value::Null, most) => (format!("at most {}", plain(most)), most),
        (least, most) => (format!("{} to {}", plain(least), plain(most)), most),
    };
    let plural = if unit.is_empty() || *last == 1 { "" } else { "s" };
    Some(format!("{words}{unit}{plural}"))
}

/// Reads the fields of an object, of objects in a list, and of objects inside them. A field is required if all
/// alternatives require it.
fn read_fields(document: &Value, schema: &Value, at: &str, fields: &mut BTreeMap<String, Field>) {
    let alternatives = alternatives(document, schema);
    let objects: Vec<&Value> = alternatives.iter().filter(|way| way["properties"].is_object()).collect();
    let names: BTreeSet<&String> = objects
        .iter()
        .flat_map(|object| object["properties"].as_object().expect("an object").keys())
        .collect();
    for name in names {
        let of_each: Vec<&Value> = objects
            .iter()
            .map(|object| &object["properties"][name])
            .filter(|found| !found.is_null())
            .collect();
        let any = json!({"anyOf": of_each});
        let asks =
            |object: &&Value| object["required"].as_array().is_some_and(|names| names.contains(&json!(name)));
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        fields.insert(path.clone(), field(document, &any, objects.iter().all(asks)));
        read_fields(document, &any, &path, fields);
    }
    let items: Vec<&Value> =
        alternatives.iter().map(|way| &way["items"]).filter(|items| items.is_object()).collect();
    if !items.is_empty() {
        read_fields(document, &json!({"anyOf": items}), &format!("{at}[]"), fields);
    }
}

// --- the page ---------------------------------------------------------------------------------------------

/// A row of a table, and its line number in the page.
struct Line<'a> {
    number: usize,
    cells: Vec<&'a str>,
    /// The paragraph above the table.
    above: String,
    /// The heading of the first column.
    heading: &'a str,
}

fn lines(page: &str) -> Vec<Line<'_>> {
    let (mut found, mut above, mut heading) = (Vec::new(), String::new(), None);
    let mut before = "";
    for (i, line) in page.lines().enumerate() {
        let last = std::mem::replace(&mut before, line);
        let Some(row) = line.strip_prefix('|') else {
            heading = None;
            if last.is_empty() && !line.is_empty() {
                above.clear();
            }
            above += line;
            continue;
        };
        let cells: Vec<&str> = row.trim_end_matches('|').split('|').map(str::trim).collect();
        match heading {
            None => heading = Some(cells[0]),
            Some(_) if cells[0].starts_with("---") => {}
            Some(heading) => found.push(Line { number: i + 1, cells, above: above.clone(), heading }),
        }
    }
    found
}

/// The text between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

fn split(cell: &str, between: &str) -> BTreeSet<String> {
    cell.split(between).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The expected rows of other servers' fields, by route and name.
fn other_lines(document: &Value) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut routes = BTreeMap::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        let mut schema = &item["post"]["requestBody"]["content"]["application/json"]["schema"];
        if let Some(reference) = schema["$ref"].as_str() {
            schema = document.pointer(&reference[1..]).expect(reference);
        }
        // Ollama's bodies have an object of options with fields of its own.
        let options = alternatives(document, &schema["properties"]["options"]);
        let of_options = options.iter().map(|options| ("options.", options));
        let of = |(at, schema): (&'static str, &Value)| {
            let fields = schema["x-other-fields"].as_array().cloned().unwrap_or_default();
            fields.into_iter().map(move |field| (at, field))
        };
        for (at, field) in std::iter::once(("", schema)).chain(of_options).flat_map(of) {
            let text = |name: &str| field[name].as_str().expect(name);
            let name = format!("{at}{}", text("name"));
            let off = field["off"].as_array().into_iter().flatten();
            let off: Vec<String> = off.map(|value| format!("`{value}`")).collect();
            assert!(!text("about").is_empty(), "{path}: {} has no reason", text("name"));
            let line = [format!("`{name}`"), text("server").into(), text("treatment").into(), off.join(", ")];
            let line = written(line);
            let lines: &mut BTreeMap<String, String> = routes.entry(format!("POST {path}")).or_default();
            lines.insert(name, line);
        }
    }
    routes
}

/// The differences between the tables of other servers' fields and the document.
fn complaints_of_others(page: &str, document: &Value) -> Vec<String> {
    let mut missing = other_lines(document);
    let mut complaints = Vec::new();
    for Line { number, cells, above, .. } in
        lines(page).into_iter().filter(|line| line.heading == "other field")
    {
        // A row names several fields if all else is the same for them.
        let names = quoted(cells[0]);
        let rest = format!("{} |", cells[1..].join(" | ")).replace("|  |", "| |");
        let of = above.strip_prefix("Other fields of ").map(quoted).unwrap_or_default();
        if of.is_empty() {
            complaints
                .push(format!("{PAGE}:{number}: no line \"Other fields of `POST /…`:\" is above the table"));
        }
        for (route, name) in of.iter().flat_map(|route| names.iter().map(move |name| (*route, *name))) {
            let line = format!("| `{name}` | {rest}");
            match missing.get_mut(route).and_then(|lines| lines.remove(name)) {
                None => complaints
                    .push(format!("{PAGE}:{number}: `{route}` has no other field `{name}`, or twice")),
                Some(expected) if expected != line => {
                    complaints.push(format!("{PAGE}:{number}: for `{route}` expected\n{expected}"));
                }
                Some(_) => {}
            }
        }
    }
    for (route, lines) in missing.into_iter().filter(|(_, lines)| !lines.is_empty()) {
        let lines: Vec<String> = lines.into_values().collect();
        complaints.push(format!("{PAGE}: the other fields of `{route}` lack\n{}", lines.join("\n")));
    }
    complaints
}

/// The differences between the page and the document. Each includes the row that the page should have.
fn complaints(page: &str, document: &Value) -> Vec<String> {
    let described = described(document);
    let (mut complaints, mut routes) = (Vec::new(), BTreeSet::new());
    let mut fields: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
    for Line { number, cells, above, heading } in lines(page) {
        let names = quoted(cells[0]);
        let name = names.first().copied().unwrap_or_default();
        match heading {
            "route" if !described.contains_key(name) => {
                complaints.push(format!("{PAGE}:{number}: there is no route `{name}`"));
            }
            "route" if !routes.insert(name) => {
                complaints.push(format!("{PAGE}:{number}: `{name}` has a line already"));
            }
            "field" => {
                let of = above.strip_prefix("Fields of ").map(quoted).unwrap_or_default();
                if of.is_empty() {
                    complaints.push(format!(
                        "{PAGE}:{number}: no line \"Fields of `POST /…`:\" is above the table"
                    ));
                }
                for (route, name) in of.iter().flat_map(|route| names.iter().map(move |name| (*route, *name)))
                {
                    if let Some(before) = fields.entry(route.to_owned()).or_default().insert(name, number) {
                        let problem = format!("`{name}` of `{route}` is already in line {before}");
                        complaints.push(format!("{PAGE}:{number}: {problem}"));
                    }
                    let Some(field) = described.get(route).and_then(|fields| fields.get(name)) else {
                        complaints.push(format!("{PAGE}:{number}: `{route}` has no field `{name}`"));
                        continue;
                    };
                    let cell = |i: usize| cells.get(i).copied().unwrap_or_default();
                    let written_field = Field {
                        types: split(cell(1), " or "),
                        bounds: split(cell(2), ", "),
                        required: cell(3) == REQUIRED,
                    };
                    if written_field != *field {
                        let line = field.line(name, cell(3), cell(4));
                        complaints.push(format!("{PAGE}:{number}: for `{route}` expected\n{line}"));
                    }
                }
            }
            _ => {}
        }
    }
    for (route, all) in &described {
        if !routes.contains(route.as_str()) {
            complaints.push(format!("{PAGE}: the table of routes lacks\n| `{route}` | |"));
        }
        let missing = all.iter().filter(|(name, _)| {
            !fields.get(route.as_str()).is_some_and(|written| written.contains_key(name.as_str()))
        });
        let lines: Vec<String> = missing.map(|(name, field)| field.line(name, "", "")).collect();
        if !lines.is_empty() {
            complaints.push(format!("{PAGE}: the tables of `{route}` lack\n{}", lines.join("\n")));
        }
    }
    complaints
}

// --- tests ----------------------------------------------------------------------------------------------

#[tokio::test]
async fn the_page_has_the_routes_and_fields_of_the_openapi_document() {
    let router = app_with_policy(AccessPolicy::default(), "Hello there").router;
    let request = Request::get("/openapi.json").body(Body::empty()).expect("a sound request");
    let (status, _, document) = send_json(&router, request).await;
    assert_eq!(status, 200);
    let page = std::fs::read_to_string(root().join(PAGE)).expect(PAGE);
    let complaints = [complaints(&page, &document), complaints_of_others(&page, &document)].concat();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[tokio::test]
async fn the_docs_name_every_route_that_needs_no_key() {
    let keys = Keys::from_variable("test", &"k".repeat(32)).expect("a key");
    let router = app_with_policy(AccessPolicy { keys, ..AccessPolicy::default() }, "Hello there").router;
    let keyless = app_with_policy(AccessPolicy::default(), "Hello there").router;
    let (_, _, document) = send_json(&keyless, get("/openapi.json")).await;
    let mut open = Vec::new();
    for path in document["paths"].as_object().expect("paths").keys() {
        let (status, _, _) = send_json(&router, get(&path.replace("{id}", "x"))).await;
        if status != 401 {
            open.push(path.as_str());
        }
    }
    let sentence = format!("every route but {} and the page's files ask", open.join(", "));
    for file in [PAGE, "docs/operations.md", "config/default.toml"] {
        let text = std::fs::read_to_string(root().join(file)).expect(file).replace(['`', '#'], " ");
        let words: Vec<&str> = text.split_whitespace().collect();
        let text = words.join(" ").replace(" ,", ",");
        assert!(text.contains(&sentence), "{file} does not say {sentence:?}");
    }
}

#[track_caller]
fn assert_complaint(found: &[String], expected: &str) {
    assert!(found.iter().any(|complaint| complaint.contains(expected)), "{expected:?} is not in {found:?}");
}

#[test]
fn a_wrong_row_of_another_servers_field_is_reported() {
    let field =
        |name| json!({"name": name, "server": "S", "treatment": "refused", "off": [0, ""], "about": "use b"});
    let body = json!({"x-other-fields": [field("a"), field("c")]});
    let document = json!({"paths": {"/a": {"post": {"requestBody": {"content": {"application/json": {"schema": body}}}}}}});
    let sound = "\
Other fields of `POST /a`:

| other field | server | treatment | off |
|---|---|---|---|
| `a`, `c` | S | refused | `0`, `\"\"` |
";
    assert_eq!(complaints_of_others(sound, &document), [""; 0]);
    for (from, to, expected) in [
        ("refused", "ignored", "docs/api.md:5: for `POST /a` expected\n| `a` | S | refused |"),
        ("`0`, ", "", "for `POST /a` expected"),
        ("| `a`", "| `b`", "has no other field `b`"),
        (", `c`", "", "the other fields of `POST /a` lack\n| `c` | S |"),
        ("`c`", "`a`", "has no other field `a`, or twice"),
        ("| `a`, `c` | S | refused | `0`, `\"\"` |", "", "the other fields of `POST /a` lack\n| `a` | S |"),
        ("Other fields", "Fields", "no line \"Other fields of `POST /…`:\" is above the table"),
    ] {
        assert_complaint(&complaints_of_others(&sound.replace(from, to), &document), expected);
    }
}

#[test]
fn wrong_and_missing_rows_are_reported() {
    let inner = |kind, needs: &[&str]| {
        json!({"type": "object", "required": needs, "properties": {
            "kind": {"type": "string", "enum": [kind]}, "text": {"type": ["string", "null"], "maxLength": 1},
        }})
    };
    let document = json!({
        "components": {"schemas": {"Part": {"oneOf": [inner("b", &["kind", "text"]), inner("a", &["kind"])]}}},
        "paths": {"/a": {"post": {"requestBody": {"content": {"application/json": {"schema": {"allOf": [
            {"type": "object", "required": ["n"], "properties": {
                "n": {"type": "integer", "minimum": -1, "maximum": 2.0},
                "off": {"anyOf": [{"type": "array", "items": {}, "maxItems": 0}, {"type": "null"}]},
            }},
            {"type": "object", "properties": {
                "parts": {"anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Part"}},
                    {"type": "array", "items": inner("c", &[])},
                    {"type": "null"},
                ]},
                "more": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0.5}},
            }},
        ]}}}}}}},
    });
    let sound = "\
| route | |
|---|---|
| `POST /a` | Does. |

Fields of `POST /a`:

| field | type | bounds | default | meaning |
|---|---|---|---|---|
| `n` | integer | -1 to 2 | required | A number. |
| `parts` | string or list of object | at least 1 item | none | Parts. |
| `parts[].kind` | string | `b`, `a`, `c` | | |
| `parts[].text` | string | at most 1 character | | |
| `off` | list of any or null | at most 0 items | | |
| `more` | object | at least 0.5 | | |
";
    assert_eq!(complaints(sound, &document), [""; 0]);

    for (from, to, expected) in [
        (
            "-1 to 2",
            "0 to 2",
            "docs/api.md:9: for `POST /a` expected\n| `n` | integer | -1 to 2 | required | A number. |",
        ),
        ("| required | A", "| 3 | A", "| `n` | integer | -1 to 2 | required | A number. |"),
        ("| integer |", "| number |", "| `n` | integer |"),
        ("| none |", "| required |", "| `parts` | list of object or string | at least 1 item | | Parts. |"),
        ("`b`, `a`", "`b`", "| `parts[].kind` | string | `a`, `b`, `c` | | |"),
        (
            "| `more` | object | at least 0.5 | | |\n",
            "",
            "the tables of `POST /a` lack\n| `more` | object | at least 0.5 | | |",
        ),
        ("`more`", "`less`", "docs/api.md:14: `POST /a` has no field `less`"),
        ("| `more`", "| `n`", "`n` of `POST /a` is already in line 9"),
        ("Fields of", "The fields of", "docs/api.md:9: no line \"Fields of `POST /…`:\" is above the table"),
        ("| `POST /a` |", "| `GET /a` |", "docs/api.md:3: there is no route `GET /a`"),
        ("| `POST /a` |", "| `GET /a` |", "the table of routes lacks\n| `POST /a` | |"),
        ("| Does. |", "| Does. |\n| `POST /a` | |", "docs/api.md:4: `POST /a` has a line already"),
    ] {
        let page = sound.replace(from, to);
        assert_ne!(page, sound, "nothing to replace");
        assert_complaint(&complaints(&page, &document), expected);
    }
}
