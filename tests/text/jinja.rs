//! Chat templates that would take too much time or memory. Each one ends with an error that names the limit, and
//! allocates little memory until then.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::text::{Message, TextError};

use crate::support::peak_allocation;
use crate::support::tables::rows;
use crate::support::tokenizers::{gemma_template, render, template};

const MIB: usize = 1 << 20;

/// Checks that a template is refused with one of the `expected` texts, and allocates at most `most` bytes until then.
/// Otherwise returns a description of the result.
fn refused(source: &str, expected: &[&str], most: usize) -> Result<(), String> {
    let shown: String = source.chars().take(300).collect();
    let (rendered, peak) = peak_allocation(|| render(source));
    match rendered {
        Err(TextError::Template { problem, .. }) => {
            let is_expected = expected.iter().any(|expected| problem.contains(expected));
            let is_sound = is_expected && !problem.contains('\n') && peak <= most;
            is_sound.then_some(()).ok_or(format!("{shown}\n    {problem}, {peak} bytes"))
        }
        other => Err(format!("{shown}\n    {:?}, {peak} bytes", other.map(|text| text.len()))),
    }
}

/// Executes the statement sixty times. It keeps its results in `ns.x` and `ns.y`.
fn again(start: &str, statement: &str) -> String {
    format!(
        "{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(60) %}}{statement}{{% endfor %}}"
    )
}

#[test]
fn a_template_that_doubles_a_string_is_refused() {
    let source = again("'aaaaaaaaaaaaaaaa'", "{% set ns.x = ns.x ~ ns.x %}") + "{{ ns.x | length }}";
    assert!(source.len() < 160, "{}", source.len());
    let problem = render(&source).unwrap_err().to_string();
    assert_eq!(problem, "chat_template.jinja: makes a value of more than 8 MiB (line 1)");
    assert_eq!(refused(&source, &["makes a value of more than 8 MiB"], 64 * MIB), Ok(()));
}

/// Each way in which a value grows faster than the number of executed instructions.
#[test]
fn values_that_grow_without_bound_are_refused() {
    let text = "'aaaaaaaa'";
    let sets = |expression: &str| format!("{{% set ns.x = {expression} %}}");
    let captures = |body: &str| format!("{{% set t %}}{body}{{% endset %}}{{% set ns.x = t %}}");
    let doubled = |start: &str, expression: &str, then: &str| again(start, &sets(expression)) + then;
    let twins = again("['a']", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}");
    let nested = |then: &str| doubled("['a']", "[ns.x, ns.x]", then);
    let macros =
        "{% macro f(x, n) %}{% if n == 0 %}{{ x }}{% else %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}";
    let cases = [
        doubled(text, "ns.x + ns.x", ""),
        doubled(text, "(ns.x ~ ns.x) ~ (ns.x ~ ns.x)", ""),
        doubled(text, "'%s' ~ ns.x|string ~ ns.x|upper", ""),
        doubled(text, "ns.x|replace('a', 'aaaaaaaa')", ""),
        doubled(text, "ns.x|replace('', ns.x)", ""),
        doubled(text, "ns.x.replace('a', ns.x)", ""),
        doubled(text, "ns.x.replace('', ns.x, 9)", ""),
        doubled(text, "[ns.x, ns.x]|join(ns.x)", ""),
        doubled(text, "ns.x|join(ns.x)", ""),
        doubled(text, "ns.x.join([ns.x, ns.x])", ""),
        doubled(text, "ns.x.join(ns.x)", ""),
        doubled(text, "[[ns.x], ns.x]|string", ""),
        doubled(text, "{'a': ns.x, 'b': ns.x}|string", ""),
        doubled(text, "['%', ns.x, ns.x]|map('upper')|join", ""),
        doubled(text, "[ns.x ~ ns.x]|sort|first", ""),
        again(text, &captures("{{ ns.x }}{{ ns.x }}")),
        again(text, &captures("{% for i in [1, 2] %}{{ ns.x }}{% endfor %}")),
        again(text, &captures("{% filter replace('a', ns.x) %}{{ ns.x }}{% endfilter %}")),
        again(text, &captures("{% autoescape true %}{{ ns.x }}{{ ns.x }}&{% endautoescape %}")),
        format!("{{% set x = {text} %}}{}", "{% set x = x ~ x %}".repeat(40)),
        format!("{{% set x = {text} %}}{}", "{% with y = x + x %}{% set x = y %}".repeat(40) + &"{% endwith %}".repeat(40)),
        format!("{macros}{{% set x = f({text}, 9) %}}{{% set x = f(x, 9) %}}{{% set x = f(x, 9) %}}"),
        macros.to_owned() + &again(text, &sets("f(ns.x, 2)")),
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}".to_owned()
            + &again(text, &captures("{% call f() %}{{ ns.x }}{% endcall %}")),
        "{% for x in ['aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'] recursive %}{{ loop([x ~ x]) }}{% endfor %}".into(),
        "{% block a %}{% set x = (x or 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa') ~ x ~ x %}{{ self.a() }}{% endblock %}".into(),
        // The elements of a shared list count once for each list that contains it.
        doubled("[1]", "ns.x + ns.x", "{{ ns.x|length }}"),
        doubled("[1]", "ns.x + ns.x", "{{ ns.x|list|length }}"),
        doubled("[1]", "ns.x[:] + ns.x[::-1]", ""),
        doubled("[1]", "(ns.x + ns.x)|reverse|list", ""),
        doubled("['a']", "ns.x + (ns.x|map('upper')|list)", ""),
        nested("{{ ns.x }}"),
        nested("{{ ns.x|string|length }}"),
        nested("{{ ns.x|join|length }}"),
        nested("{{ 'a' in ns.x }}"),
        nested("{{ ns.x in 'a' }}"),
        nested("{{ raise_exception(ns.x) }}"),
        nested("{{ {ns.x: 1, [ns.x]: 2} }}"),
        nested("{% set t %}{{ ns.x }}{% endset %}"),
        doubled("{'a': 1}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x }}"),
        doubled("{'a': 1}", "{ns.x: 1, [ns.x]: ns.x}", ""),
        doubled("{'a': 1}", "dict(a=ns.x, b=ns.x)", "{{ ns.x }}"),
        doubled("{'a': 1}", "[ns.x.items(), ns.x|items, {'a': ns.x, 'b': ns.x}]|last", ""),
        twins.clone() + "{{ ns.x == ns.y }}",
        twins.clone() + "{{ ns.x < ns.y < ns.x }}",
        twins.clone() + "{{ ns.x is eq ns.y }}",
        twins.clone() + "{{ ns.y is in [ns.x] }}",
        twins.clone() + "{{ [ns.x, ns.y]|sort|length }}",
        twins.clone() + "{{ [ns.x, ns.y]|unique|list|length }}",
        twins.clone() + "{{ [ns.x, ns.y]|max|length }}",
        twins.clone() + "{{ {ns.x: 1}[ns.y] }}",
        twins.clone() + "{{ [[ns.x], [ns.y]]|groupby('0')|length }}",
        twins.clone() + "{{ [ns.x]|select('eq', ns.y)|list }}",
        twins.clone() + "{{ [{'a': ns.x}]|selectattr('a', 'equalto', ns.y)|list }}",
        twins + "{% for x in [ns.x, ns.y] %}{{ loop.changed(x) }}{% endfor %}",
    ];
    let expected = [
        "makes a value of more than 8 MiB",
        "writes more than 32 MiB",
        "nests values more than 64 deep",
        "recursion limit exceeded",
    ];
    let wrong: Vec<_> =
        cases.iter().filter_map(|source| refused(source, &expected, 64 * MIB).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn templates_that_take_too_much_time_or_stack_are_refused() {
    let long = |name: &str, bytes: usize| {
        let (start, times) = ("aaaaaaaa", (bytes / 8).ilog2());
        format!(
            "{{% set {name} = namespace(t='{start}') %}}{{% for i in range({times}) %}}{{% set {name}.t = {name}.t ~ {name}.t %}}{{% endfor %}}"
        )
    };
    let mib = long("a", MIB);
    let cases = [
        // Nested values are freed, and lazy lists are read, by recursion.
        (
            again("[]", "{% for j in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}"),
            "nests values more than 64 deep",
        ),
        (
            again("[]", "{% for j in range(9999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"),
            "nests values more than 64 deep",
        ),
        (
            again("{'a': 1}", "{% for j in range(9999) %}{% set ns.x = {'a': ns.x}.items() %}{% endfor %}"),
            "nests values more than 64 deep",
        ),
        ("{% set a = namespace(a=a) %}".repeat(9000), "only data can be stored"),
        ("{% set a = dict(a=a) %}".repeat(9000), "nests values more than 64 deep"),
        (again("1", "{% for j in [ns.x] %}{% set ns.x = loop %}{% endfor %}"), "only data can be stored"),
        (again("1", "{% macro f() %}{{ ns }}{% endmacro %}{% set ns.x = f %}"), "only data can be stored"),
        // A value that holds itself is never freed.
        (again("1", "{% set ns.x = ns %}{{ ns }}"), "only data can be stored"),
        (again("1", "{% set ns.x = [{'a': ns}] %}{{ ns }}"), "only data can be stored"),
        (again("1", "{{ loop.changed(loop) }}"), "only data can be stored"),
        (again("1", "{{ loop.changed(1, [loop]) }}"), "only data can be stored"),
        // The work is the product of the lengths of two texts.
        (
            format!("{mib}{}{{{{ a.t.strip(b.t ~ 'a') }}}}", long("b", MIB).replace("aaaaaaaa", "bcdefghi")),
            "reads and makes values of",
        ),
        (format!("{mib}{{{{ a.t|trim(a.t) }}}}"), "reads and makes values of"),
        (format!("{mib}{{{{ a.t|map('replace', 'b', a.t)|list }}}}"), "makes a value"),
        (
            format!(
                "{{% set x %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}",
                "x".repeat(60_000)
            ),
            "writes more than 32 MiB",
        ),
        (format!("{{{{ 'a'|map({}'upper') }}}}", "'map', ".repeat(1000)), "nests filters"),
        // Compiling recurses along operators, and repeats some of its work at each.
        (format!("{{{{ x{} }}}}", " ~ x".repeat(60_000)), "line 1 is in a tag of more than 4096"),
        (
            format!("\n{{% if x{} %}}{{% endif %}}", ".x".repeat(60_000)),
            "line 2 is in a tag of more than 4096",
        ),
        ("{% import 'chat' as c %}".into(), "recursion"),
        ("{% extends 'chat' %}".into(), "recursion"),
    ];
    // Each of these reads or makes a text of one MiB again and again.
    let repeated = [
        "{{ 'b' in a.t }}",
        "{% if a.t == a.t ~ '' %}{% endif %}",
        "{% if a.t[-1] == 'b' %}{% endif %}",
        "{% if a.t|length == 1 %}{% endif %}",
        "{% for c in a.t %}{% break %}{% endfor %}",
        "{% if a.t is lower %}{% endif %}",
        "{% if a.t.find('b') == 1 %}{% endif %}",
    ];
    let repeated = repeated.map(|body| {
        (format!("{mib}{{% for i in range(9999) %}}{body}{{% endfor %}}"), "reads and makes values of")
    });
    let check = |(source, expected): &(String, &str)| refused(source, &[expected], 96 * MIB).err();
    let wrong: Vec<_> = cases.iter().chain(&repeated).filter_map(check).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The deepest nesting that a source can have.
    let elifs = "{% if x %}".to_owned() + &"{% elif x %}".repeat(20_000) + "{% endif %}";
    let operators = format!("{{{{ x{} }}}}", " ~ x".repeat(2000));
    let negations = format!("{{{{ {} x }}}}", "not ".repeat(4001));
    let slices = again("['a']", "{% for j in range(999) %}{% set ns.x = ns.x[:] + [] %}{% endfor %}")
        + "{{ ns.x|list }}";
    for (source, expected) in [
        (elifs.as_str(), ""),
        (&operators, ""),
        (&negations, "True"),
        (&slices, "[\"a\"]"),
        ("{{ 'aé'.count('') }}", "3"),
    ] {
        assert_eq!(render(source).as_deref(), Ok(expected), "{}", &source[..source.len().min(60)]);
    }
}

/// Ordinary templates, whose work is counted, with their texts.
const COUNTED: &str = r#"
{% for i in range(9) if i > 3 %}{{ i }}{% else %}none{% endfor %} => 45678
{% for i in range(3) if i > 3 %}{{ i }}{% else %}none{% endfor %} => none
{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}={{ b }};{% endfor %} => x=1;y=2;
{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %} => (1(2))(3)
{% for a in 'aab' %}{{ loop.cycle('x', 'y') }}{{ loop.changed(a) }}{{ loop.previtem }}{{ loop }}{% endfor %} => xTrue<loop 0/?>yFalsea<loop 1/?>xTruea<loop 2/?>
{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %} => 023
{% macro f(x, y='d') %}<{{ x }}{{ y }}>{% endmacro %}{{ f(1) }}{{ f(x=2, y=3) }}{% set t = f('a') ~ f('b') %}{{ t }} => <1d><23><ad><bd>
{% set out = 'o' %}{% macro f() %}{{ out }}{% for i in [1] %}{{ out ~ i }}{% endfor %}{% endmacro %}{{ f() }} => oo1
{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f('q') %}{{ y }}!{% endcall %} => <q!>
{% set x | upper %}abc{% endset %}{{ x }}{% filter replace('b', 'x') %}abc{% endfilter %} => ABCaxc
{% block a %}{{ 1 }}{% endblock %}{{ self.a() }}{% set x %}{{ self.a() }}{% endset %}{{ x }} => 111
{% set a, b = [1, 2] %}{{ a }}{{ b }}{% with a = 3, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }} => 12331
{% set ns = namespace(a=1, b=[1]) %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% set ns.b = ns.b + [i] %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.b|length }} => 4[1, 0, 1, 2]4
{% set ns = namespace() %}{% set ns.m = messages[0] %}{% set ns.l = messages + [ns.m] %}{{ ns.m.role }}{{ ns.l|length }}{{ ns.l[-1].content }} => user2hi
{{ messages[0] }}{{ messages[1:] }}{{ messages[::-1][0]['role'] }}{{ messages|map(attribute='role')|join }} => {"role": "user", "content": "hi"}[]useruser
{{ 1 < 2 < 3 }}{{ 3 > 2 > 2 }}{{ 'a' in 'abc' }}{{ 'x' not in ['y'] }}{{ 1 == 1.0 }}{{ 'a' in {'a': 1} }}{{ 2 in range(3) }} => TrueFalseTrueTrueTrueTrueTrue
{{ [1, 2] + [3] }}{{ 'a' + 'b' ~ 1 ~ none ~ [1] }}{{ 1 + 1.5 }}{{ true + 1 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ -3 }}{{ 1 - 2 }} => [1, 2, 3]ab1None[1]2.5233-3-1
{{ 'abc'[1:] }}{{ 'abc'[-1] }}{{ [1, 2, 3][::-1] }}{{ [3, 1, 2]|sort }}{{ range(5)[1:3] }}{{ range(3)|list }}{{ 'ab'|list }} => bcc[3, 2, 1][1, 2, 3][1, 2][0, 1, 2]["a", "b"]
{{ 'a-b'.split('-') }}{{ 'a b  c'.split() }}{{ 'aXb'.split('X', 1)[0] }}{{ ', '.join(['a', 'b']) }}{{ 'ab'.replace('a', 'c') }}{{ 'xax'.strip('x') }} => ["a", "b"]["a", "b", "c"]aa, bcba
{{ {'b': 1, 'a': 2}|dictsort }}{{ {'a': 1}.get('b', 3) }}{{ {'a': 1}.keys() }}{{ {'a': 1}.values()|list }}{{ dict(a=1, b=[2]) }} => [["a", 2], ["b", 1]]3["a"][1]{"a": 1, "b": [2]}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ [1, 2, 3]|select('odd')|list }}{{ [1, none]|reject('none')|list }}{{ [0, 1]|map('string')|join('-') }} => 1[1, 3][1]0-1
{{ x|default('d') }}{{ ''|default('e', true) }}{{ 'd' if x is not defined }}{{ 1 if false }}{{ (messages|first).role }}{{ [1, 1, 2]|unique|list }}{{ [1, 2]|sum }} => deduser[1, 2]3
{% autoescape true %}<b>{{ '<' }}{% set x %}<i>{% endset %}{{ x }}{% endautoescape %} => <b>&lt;<i>
{% if namespace(a=1) %}a{% endif %}{% if [] or {} or '' or 0 %}b{% elif not none %}c{% endif %} => ac
"#;

#[test]
fn counting_the_work_does_not_change_what_templates_mean() {
    for (source, expected) in rows(COUNTED) {
        assert_eq!(render(&source).as_ref(), Ok(&expected), "{source}");
    }
}

#[test]
fn long_conversations_are_rendered() {
    let turns = |count: usize, text: &str| -> Vec<_> {
        (0..count).map(|at| Message::new(if at % 2 == 0 { "user" } else { "assistant" }, text)).collect()
    };
    let gemma = gemma_template();
    // The cases: as many turns as fit, one turn near the limit, and one turn far above it.
    assert!(gemma.render(&turns(50_000, "hi"), true).is_ok());
    assert!(gemma.render(&turns(1, &"x".repeat(2_000_000)), true).is_ok());
    let limit = unicorn::text::MAX_TEXT_BYTES;
    let error = gemma.render(&turns(1, &"x".repeat(60_000_000)), true).unwrap_err();
    assert_eq!(error, TextError::TooLong { bytes: 60_000_025, limit });

    // This template collects turns and text, so it copies all of the text at each turn.
    let gathers = "{% set ns = namespace(out='', turns=[]) %}\
        {% for m in messages %}{% set ns.turns = ns.turns + [m] %}{% endfor %}\
        {% for m in ns.turns %}{% set ns.out = ns.out ~ '<' + m.role + '>' ~ m.content|trim ~ '\n' %}\
        {% if loop.index == messages|length %}{% set ns.out = ns.out ~ 'end' %}{% endif %}{% endfor %}{{ ns.out }}";
    let gathers = template(gathers).unwrap();
    for (count, bytes) in [(1000, 200), (200, 2500)] {
        let text = gathers.render(&turns(count, &"x".repeat(bytes)), true).unwrap();
        assert!(text.len() > count * bytes && text.ends_with("end"), "{count} turns of {bytes} bytes");
    }
    // A table of languages, as templates for translation models have.
    let names: Vec<String> = (0..600).map(|at| format!("'l{at}': 'Language {at}'")).collect();
    let table = format!("{{% set names = {{{}}} %}}{{{{ names['l599'] }}}}", names.join(", "));
    assert_eq!(render(&table).as_deref(), Ok("Language 599"));
}

/// Random programs of operations that make values grow. Variables are texts (`s`, `t`) and lists (`l`, `m`). Each is
/// made of all others.
struct Programs {
    rng: ChaCha8Rng,
}

impl Programs {
    fn pick<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.rng.random_range(0..of.len())]
    }

    fn text(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.pick(&["ns.s", "ns.t", "ns.s", "ns.t", "u", "'ab'", "'\\u0001'"]).to_owned();
        }
        let (a, b) = (self.text(depth - 1), self.text(depth - 1));
        let list = self.list(depth - 1);
        match self.rng.random_range(0..17) {
            0 => format!("({a} ~ {b})"),
            1 => format!("({a} + {b})"),
            2 => format!("({a} ~ {list})"),
            3 => format!("{list}|join({a})"),
            4 => format!("({a}).join({list})"),
            5 => format!("({a})|replace({b}, ns.t)"),
            6 => format!("({a}).replace('a', {b})"),
            7 => format!("{list}|string"),
            8 => format!(
                "({a})|{}",
                self.pick(&["upper", "title", "e", "trim", "reverse", "string", "d(ns.s)"])
            ),
            9 => format!("({a})[{}]", self.pick(&["1:", ":-1", "::-1", "::2"])),
            10 => format!("f({a})"),
            11 => format!("g({list}, {a})"),
            12 => format!("({a}).strip({b})"),
            13 => format!("({a} if {b} {} {a} else {b})", self.pick(&["in", "==", "<", "!="])),
            14 => format!("({list}|last|string)"),
            15 => format!("loop.cycle({a}, {b})"),
            _ => format!("({{'k': {a}, 'l': {list}}}|string)"),
        }
    }

    fn list(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.pick(&["ns.l", "ns.m", "ns.l", "ns.m", "[1]", "range(99)", "messages"]).to_owned();
        }
        let (a, b) = (self.list(depth - 1), self.list(depth - 1));
        let text = self.text(depth - 1);
        match self.rng.random_range(0..16) {
            0 | 1 => format!("({a} + {b})"),
            2 => format!("[{a}, {b}]"),
            3 => format!("[{text}, {a}]"),
            4 => format!(
                "{a}|{}",
                self.pick(&["list", "sort", "unique|list", "reverse", "reverse|list", "select|list"])
            ),
            5 => format!(
                "{a}|map('{}')|list",
                self.pick(&["string", "upper", "list", "length", "first", "last"])
            ),
            6 => format!("({text})|list"),
            7 => format!("({text}).{}", self.pick(&["split()", "split('a')", "split('')", "splitlines()"])),
            8 => format!("({a})[{}]", self.pick(&["1:", ":-1", "::-1", "::2"])),
            9 => format!("{{'a': {a}, {text}: {b}}}.{}()", self.pick(&["items", "keys", "values"])),
            10 => format!("dict(a={a}, b={b})|{}", self.pick(&["dictsort", "items", "list"])),
            11 => format!("{a}|map('default', {b})|list"),
            12 => format!("{a}|select('in', {b})|list"),
            13 => format!("{a}|groupby('0')"),
            14 => format!("([{a}, {b}]|{})", self.pick(&["max", "min", "first", "last", "list"])),
            _ => format!("{a}|rejectattr('role', 'equalto', {text})|list"),
        }
    }

    fn statement(&mut self, depth: usize) -> String {
        let expressions = self.rng.random_range(1..4);
        if depth == 0 || self.rng.random_bool(0.6) {
            let (text, list) = (self.text(expressions), self.list(expressions));
            return match self.rng.random_range(0..8) {
                0..3 => format!("{{% set ns.{} = {text} %}}", self.pick(&["s", "t"])),
                3..6 => format!("{{% set ns.{} = {list} %}}", self.pick(&["l", "m"])),
                6 => format!("{{% set u = {text} %}}"),
                _ => format!(
                    "{{% if {list} == {list} or {text} in {list} %}}{{% set ns.s = 'b' %}}{{% endif %}}"
                ),
            };
        }
        let body = (0..self.rng.random_range(1..4)).map(|_| self.statement(depth - 1)).collect::<String>();
        let (text, list) = (self.text(1), self.list(1));
        match self.rng.random_range(0..6) {
            0..3 => format!("{{% for i in range({}) %}}{body}{{% endfor %}}", self.pick(&["9", "30", "300"])),
            3 => format!("{{% for u in {list} %}}{body}{{% endfor %}}"),
            4 => format!(
                "{{% set t %}}{body}{{{{ {text} }}}}{{{{ {list} }}}}{{% endset %}}{{% set ns.t = t %}}"
            ),
            _ => format!("{{% with u = {text} %}}{body}{{% endwith %}}"),
        }
    }

    fn program(&mut self) -> String {
        let macros = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% macro g(l, x) %}{% for i in l %}{{ x }}{% endfor %}{% endmacro %}";
        let body = (0..self.rng.random_range(2..6)).map(|_| self.statement(3)).collect::<String>();
        let start = "{% set ns = namespace(s='abc', t='a', l=['a'], m=[[1]]) %}{% set u = 'u' %}";
        format!("{macros}{start}{{% for j in range(99) %}}{body}{{% endfor %}}")
    }
}

#[test]
fn random_programs_that_grow_end_within_their_limits() {
    const SEED: u64 = 0x9a0;
    println!("seed {SEED}");
    let mut programs = Programs { rng: ChaCha8Rng::seed_from_u64(SEED) };
    let mut ends = BTreeMap::<String, (usize, usize)>::new();
    for round in 0..40 {
        let source = programs.program();
        let template = template(&source).unwrap_or_else(|error| panic!("{round}: {source}: {error}"));
        let (rendered, peak) = peak_allocation(|| template.render(&[Message::new("user", "hi")], true));
        assert!(peak < 128 * MIB, "{round}: {peak} bytes: {source}");
        let end = match rendered {
            Ok(_) => "whole".to_owned(),
            Err(error) => error
                .to_string()
                .split(" (line")
                .next()
                .unwrap_or_default()
                .replace(|c: char| c.is_ascii_digit(), ""),
        };
        let end = ends.entry(end).or_default();
        *end = (end.0 + 1, end.1.max(peak));
    }
    println!("{ends:#?}");
}
