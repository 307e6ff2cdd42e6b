//! Parses the text of a GBNF grammar into rules. Errors give line and column.
//!
//! In the result, every referenced rule is defined exactly once, and no rule is left-recursive. The nesting of groups
//! and repetitions is bounded, so that code may walk the nodes of a rule by recursion.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use super::chars::CharSet;

/// Deepest nesting of groups.
const MAX_GROUPS: usize = 64;
/// Deepest nesting of nodes. A group has up to three: alternatives, a sequence, and a repetition.
const MAX_DEPTH: usize = 3 * MAX_GROUPS;
/// The error for a rule that exceeds one of these two bounds.
const TOO_DEEP: &str = "expected groups and repetitions that nest less deeply";
/// Largest number in a repetition; llama.cpp has the same limit.
const MAX_REPETITIONS: u32 = 2000;

/// A part of a rule. The numbers are indices into [`Syntax::nodes`].
#[derive(Debug, PartialEq)]
pub enum Node {
    /// One character of a set, which is not empty.
    Chars(CharSet),
    /// A reference to a rule: an index into [`Syntax::rules`].
    Rule(usize),
    /// Nodes one after another. An empty sequence is the empty text.
    Seq(Vec<usize>),
    Alt(Vec<usize>),
    /// A node `min` to `max` times. `min` is at least 1; `max: None` = no limit. An optional part is a [`Node::Alt`] of
    /// the part and the empty text.
    Repeat {
        node: usize,
        min: u32,
        max: Option<u32>,
    },
}

#[derive(Debug)]
pub struct Rule {
    /// A node other than [`Node::Rule`].
    pub body: usize,
    /// All nodes of the rule. Each node comes after its parts.
    pub nodes: Range<usize>,
}

#[derive(Debug)]
pub struct Syntax {
    pub nodes: Vec<Node>,
    pub rules: Vec<Rule>,
    /// The index of the rule `root`.
    pub root: usize,
}

impl Syntax {
    /// The body of the rule if the node is a reference, otherwise the node itself.
    pub fn target(&self, node: usize) -> usize {
        match self.nodes[node] {
            Node::Rule(rule) => self.rules[rule].body,
            _ => node,
        }
    }

    /// For each rule, the rules that it refers to, each once.
    pub fn references(&self) -> Vec<Vec<usize>> {
        let referred = |rule: &Rule| {
            let nodes = self.nodes[rule.nodes.clone()].iter();
            let rules = nodes.filter_map(|node| if let Node::Rule(rule) = node { Some(*rule) } else { None });
            rules.collect::<BTreeSet<usize>>().into_iter().collect()
        };
        self.rules.iter().map(referred).collect()
    }
}

/// Visits a graph depth first. `edges` are the successors of each vertex.
pub struct DepthFirst {
    /// All vertices. Each comes after its successors, except for successors along a back edge, which closes a cycle.
    pub order: Vec<usize>,
    /// At least one vertex of each cycle.
    pub on_cycles: Vec<usize>,
}

impl DepthFirst {
    pub fn visit(edges: &[Vec<usize>]) -> Self {
        #[derive(Clone, Copy, PartialEq)]
        enum State {
            New,
            Open,
            Done,
        }
        let mut states = vec![State::New; edges.len()];
        let mut visit = Self { order: Vec::with_capacity(edges.len()), on_cycles: Vec::new() };
        // The path to the current vertex. Each vertex has the number of its successors that were visited.
        let mut path: Vec<(usize, usize)> = Vec::new();
        for start in 0..edges.len() {
            if states[start] == State::New {
                states[start] = State::Open;
                path.push((start, 0));
            }
            while let Some((vertex, seen)) = path.last_mut() {
                let Some(&next) = edges[*vertex].get(*seen) else {
                    states[*vertex] = State::Done;
                    visit.order.push(*vertex);
                    path.pop();
                    continue;
                };
                *seen += 1;
                match states[next] {
                    State::New => {
                        states[next] = State::Open;
                        path.push((next, 0));
                    }
                    State::Open => visit.on_cycles.push(next),
                    State::Done => {}
                }
            }
        }
        visit
    }
}

/// Parses a grammar.
pub fn read(text: &str) -> Result<Syntax, String> {
    let mut reader = Reader {
        text,
        at: 0,
        nodes: Vec::new(),
        depths: Vec::new(),
        rules: Vec::new(),
        indices: HashMap::new(),
    };
    reader.space(true);
    while reader.peek().is_some() {
        reader.rule()?;
    }
    reader.finish()
}

/// A rule that is defined or referenced.
struct Named<'a> {
    name: &'a str,
    /// The byte at which the rule is defined or, before that, first referenced.
    at: usize,
    rule: Option<Rule>,
}

struct Reader<'a> {
    text: &'a str,
    /// Bytes read.
    at: usize,
    nodes: Vec<Node>,
    /// For each node, the nesting depth of the nodes in it.
    depths: Vec<usize>,
    rules: Vec<Named<'a>>,
    indices: HashMap<&'a str, usize>,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn take(&mut self, expected: &str) -> bool {
        let is_next = self.rest().starts_with(expected);
        if is_next {
            self.at += expected.len();
        }
        is_next
    }

    /// An error at a byte of the text.
    fn wrong<T>(&self, at: usize, problem: &str) -> Result<T, String> {
        let before = &self.text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        Err(format!("line {line}, column {column}: {problem}"))
    }

    /// An error at the next character.
    fn expected<T>(&self, expected: &str) -> Result<T, String> {
        let found = self.peek().map_or("the end".to_owned(), |found| format!("{found:?}"));
        self.wrong(self.at, &format!("expected {expected}, found {found}"))
    }

    /// Skips spaces, tabs and comments. With `lines`, also skips line ends.
    fn space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => self.at += 1,
                '\r' | '\n' if lines => self.at += 1,
                '#' => self.at += self.rest().find(['\r', '\n']).unwrap_or(self.rest().len()),
                _ => break,
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let rest = self.rest();
        let other = |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_';
        let name = &rest[..rest.find(other).unwrap_or(rest.len())];
        self.at += name.len();
        (!name.is_empty()).then_some(name)
    }

    /// The index of a rule. `at` is the position of its name in the text.
    fn index(&mut self, name: &'a str, at: usize) -> usize {
        *self.indices.entry(name).or_insert_with(|| {
            self.rules.push(Named { name, at, rule: None });
            self.rules.len() - 1
        })
    }

    fn push(&mut self, node: Node) -> Result<usize, String> {
        let depth = |nodes: &[usize]| nodes.iter().map(|node| self.depths[*node] + 1).max().unwrap_or(0);
        let depth = match &node {
            Node::Chars(_) | Node::Rule(_) => 0,
            Node::Seq(nodes) | Node::Alt(nodes) => depth(nodes),
            Node::Repeat { node, .. } => depth(&[*node]),
        };
        if depth > MAX_DEPTH {
            return self.wrong(self.at, TOO_DEEP);
        }
        self.depths.push(depth);
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn rule(&mut self) -> Result<(), String> {
        let at = self.at;
        let Some(name) = self.name() else { return self.expected("the name of a rule") };
        let index = self.index(name, at);
        if self.rules[index].rule.is_some() {
            return self.wrong(at, &format!("the rule {} is defined twice", quoted(name)));
        }
        self.rules[index].at = at;
        self.space(false);
        if !self.take("::=") {
            return self.expected("\"::=\"");
        }
        self.space(true);
        let start = self.nodes.len();
        let mut body = self.alternatives(0)?;
        if matches!(self.nodes[body], Node::Rule(_)) {
            body = self.push(Node::Seq(vec![body]))?;
        }
        self.rules[index].rule = Some(Rule { body, nodes: start..self.nodes.len() });
        if !matches!(self.peek(), None | Some('\r' | '\n')) {
            return self.expected("a part of a rule, or the end of the line");
        }
        self.space(true);
        Ok(())
    }

    /// Reads alternatives at the nesting depth `groups`, up to a character that cannot be part of them.
    fn alternatives(&mut self, groups: usize) -> Result<usize, String> {
        let mut choices = vec![self.sequence(groups)?];
        while self.take("|") {
            self.space(true);
            choices.push(self.sequence(groups)?);
        }
        if choices.len() == 1 { Ok(choices[0]) } else { self.push(Node::Alt(choices)) }
    }

    fn sequence(&mut self, groups: usize) -> Result<usize, String> {
        let mut parts = Vec::new();
        loop {
            let at = self.at;
            match self.peek() {
                Some('"') => parts.push(self.string()?),
                Some('[') => parts.push(self.class()?),
                Some('.') => {
                    self.at += 1;
                    parts.push(self.push(Node::Chars(CharSet::any()))?);
                }
                Some('(') => parts.push(self.group(groups + 1)?),
                Some('*' | '+' | '?' | '{') => {
                    let Some(node) = parts.pop() else {
                        return self.expected("something to repeat before it");
                    };
                    parts.push(self.repetition(node, groups > 0)?);
                }
                Some('<' | '!') => {
                    let problem = "expected text, found a token; token literals are not supported";
                    return self.wrong(at, problem);
                }
                _ => match self.name() {
                    Some(name) => {
                        let index = self.index(name, at);
                        parts.push(self.push(Node::Rule(index))?);
                    }
                    None => break,
                },
            }
            self.space(groups > 0);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { self.push(Node::Seq(parts)) }
    }

    fn group(&mut self, groups: usize) -> Result<usize, String> {
        if groups > MAX_GROUPS {
            return self.wrong(self.at, TOO_DEEP);
        }
        self.at += 1;
        self.space(true);
        let node = self.alternatives(groups)?;
        if !self.take(")") {
            return self.expected("a part of a rule, or \")\"");
        }
        Ok(node)
    }

    fn string(&mut self) -> Result<usize, String> {
        self.at += 1;
        let mut parts = Vec::new();
        while !self.take("\"") {
            let at = self.at;
            let code = self.character("a character, or the closing '\"'")?;
            let set = CharSet::new(vec![(code, code)]);
            if set.is_empty() {
                return self.wrong(at, "expected the code point of a character");
            }
            parts.push(self.push(Node::Chars(set))?);
        }
        if parts.len() == 1 { Ok(parts[0]) } else { self.push(Node::Seq(parts)) }
    }

    fn class(&mut self) -> Result<usize, String> {
        let start = self.at;
        self.at += 1;
        let negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let at = self.at;
            let from = self.character("a character, or the closing ']'")?;
            // A dash before the closing bracket is a character, not a range.
            let mut to = from;
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                to = self.character("the last character of the range")?;
            }
            if to < from {
                return self.wrong(at, "expected a range whose end is not before its start");
            }
            ranges.push((from, to));
        }
        let none = ranges.is_empty();
        let set = CharSet::new(ranges);
        let set = if negated { set.negated() } else { set };
        if none || set.is_empty() {
            return self.wrong(start, "expected a class of at least one character");
        }
        self.push(Node::Chars(set))
    }

    /// The number of the next character or escape. It may be a number that is not a code point.
    fn character(&mut self, expected: &str) -> Result<u32, String> {
        let at = self.at;
        let Some(next) = self.peek() else { return self.expected(expected) };
        self.at += next.len_utf8();
        if next != '\\' {
            return Ok(next.into());
        }
        let Some(escape) = self.peek() else { return self.expected("an escape") };
        let digits = match escape {
            'n' => return self.escaped('\n'),
            'r' => return self.escaped('\r'),
            't' => return self.escaped('\t'),
            '\\' | '"' | '[' | ']' | '-' => return self.escaped(escape),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => {
                let known = r#"an escape: one of \n \r \t \\ \" \[ \] \- \x \u \U"#;
                return self.wrong(at, &format!("expected {known}"));
            }
        };
        self.at += 1;
        let code =
            self.rest().get(..digits).filter(|text| text.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let Some(code) = code.and_then(|text| u32::from_str_radix(text, 16).ok()) else {
            return self.expected(&format!("{digits} hexadecimal digits"));
        };
        self.at += digits;
        Ok(code)
    }

    fn escaped(&mut self, character: char) -> Result<u32, String> {
        self.at += 1;
        Ok(character.into())
    }

    /// Reads a repetition operator, and applies it to a node.
    fn repetition(&mut self, node: usize, lines: bool) -> Result<usize, String> {
        let at = self.at;
        let (min, max) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            _ => {
                self.at += 1;
                self.space(lines);
                let min = self.number("a number of repetitions")?;
                self.space(lines);
                let mut max = Some(min);
                if self.take(",") {
                    self.space(lines);
                    let open = self.rest().starts_with('}');
                    max = if open { None } else { Some(self.number("a number of repetitions, or \"}\"")?) };
                    self.space(lines);
                }
                if !self.rest().starts_with('}') {
                    return self.expected("\"}\"");
                }
                (min, max)
            }
        };
        self.at += 1;
        if max.is_some_and(|max| max < min) {
            return self.wrong(at, "expected a repetition whose first number is not larger than the second");
        }
        match (min, max) {
            (_, Some(0)) => self.push(Node::Seq(Vec::new())),
            (1, Some(1)) => Ok(node),
            (0, _) => {
                let some = if max == Some(1) { node } else { self.push(Node::Repeat { node, min: 1, max })? };
                let none = self.push(Node::Seq(Vec::new()))?;
                self.push(Node::Alt(vec![some, none]))
            }
            _ => self.push(Node::Repeat { node, min, max }),
        }
    }

    fn number(&mut self, expected: &str) -> Result<u32, String> {
        let rest = self.rest();
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        if digits == 0 {
            return self.expected(expected);
        }
        match rest[..digits].parse() {
            Ok(number) if number <= MAX_REPETITIONS => {
                self.at += digits;
                Ok(number)
            }
            _ => self.wrong(self.at, &format!("expected at most {MAX_REPETITIONS} repetitions")),
        }
    }

    /// Checks for errors that concern several rules: missing rules and left recursion.
    fn finish(mut self) -> Result<Syntax, String> {
        let Some(&root) = self.indices.get("root") else {
            return self.expected("a rule with the name \"root\"");
        };
        let mut rules = Vec::with_capacity(self.rules.len());
        for named in &mut self.rules {
            let Some(rule) = named.rule.take() else {
                let (at, name) = (named.at, quoted(named.name));
                return self.wrong(at, &format!("the rule {name} is not defined"));
            };
            rules.push(rule);
        }
        let syntax = Syntax { nodes: std::mem::take(&mut self.nodes), rules, root };
        let left = DepthFirst::visit(&begins(&syntax));
        if let Some(rule) = left.on_cycles.first() {
            let (at, name) = (self.rules[*rule].at, quoted(self.rules[*rule].name));
            let problem = "begins with itself; left recursion is not supported, use a repetition";
            return self.wrong(at, &format!("the rule {name} {problem}"));
        }
        Ok(syntax)
    }
}

/// A rule's name for an error. A long name is cut.
fn quoted(name: &str) -> String {
    const MOST: usize = 40;
    if name.len() <= MOST { format!("{name:?}") } else { format!("\"{}...\"", &name[..MOST]) }
}

/// For each rule, the rules that it may begin with.
fn begins(syntax: &Syntax) -> Vec<Vec<usize>> {
    let nullable = nullable(syntax);
    let mut edges = vec![Vec::new(); syntax.rules.len()];
    for (rule, begins) in syntax.rules.iter().zip(&mut edges) {
        let mut pending = vec![rule.body];
        while let Some(node) = pending.pop() {
            match &syntax.nodes[node] {
                Node::Chars(_) => {}
                Node::Rule(rule) => begins.push(*rule),
                Node::Seq(parts) => {
                    let first = parts.iter().position(|part| !nullable[*part]).map_or(parts.len(), |i| i + 1);
                    pending.extend(&parts[..first]);
                }
                Node::Alt(choices) => pending.extend(choices),
                Node::Repeat { node, .. } => pending.push(*node),
            }
        }
    }
    edges
}

/// For each node, whether it accepts the empty text.
fn nullable(syntax: &Syntax) -> Vec<bool> {
    let mut users = vec![Vec::new(); syntax.rules.len()];
    for (user, references) in syntax.references().into_iter().enumerate() {
        for rule in references {
            users[rule].push(user);
        }
    }
    let mut nullable = vec![false; syntax.nodes.len()];
    let mut pending: Vec<usize> = (0..syntax.rules.len()).collect();
    while let Some(index) = pending.pop() {
        let rule = &syntax.rules[index];
        let before = nullable[rule.body];
        for node in rule.nodes.clone() {
            nullable[node] = match &syntax.nodes[node] {
                Node::Chars(_) => false,
                Node::Rule(rule) => nullable[syntax.rules[*rule].body],
                Node::Seq(parts) => parts.iter().all(|part| nullable[*part]),
                Node::Alt(choices) => choices.iter().any(|choice| nullable[*choice]),
                Node::Repeat { node, .. } => nullable[*node],
            };
        }
        if nullable[rule.body] && !before {
            pending.append(&mut users[index]);
        }
    }
    nullable
}
