//! llama.cpp's GBNF grammars: an answer is accepted if and only if its grammar accepts it, and an error in a grammar is
//! reported with its line and column.
//!
//! Random grammars are checked against `Expr::ends`, which tries every way to parse a text.

use std::collections::BTreeSet;
use std::fmt::Write;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use unicorn::text::{GrammarSource, Grammars, MAX_GRAMMAR_BYTES, TextError, Tokenizer};

use crate::support::grammars::{STOPS, accepts, allowed, assert_language, grammars, refusal};
use crate::support::tokenizers::{real_tokenizer_json, tokenizer};
use crate::support::{self, fuzz_bodies, rounds};

fn gbnf(text: &str) -> GrammarSource {
    GrammarSource::Gbnf(text.into())
}

const JSON: &str = r#"
# Any JSON.
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws ( value
    ("," ws value)*   # as many as there are
  )? "]" ws
string ::= "\"" ( [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#;

/// An object that may contain another one. A string has the same first character as the fixed keys.
const SCHEMA: &str = r#"
root  ::= node
node  ::= "{" ws "\"name\"" ws ":" ws string ("," ws "\"next\"" ws ":" ws node)? "}" ws
string ::= "\"" [^"\\]* "\"" ws
ws    ::= [ \n]*
"#;

const ARITHMETIC: &str = r#"
root ::= (expr "=" [ ]? num "\n")+
expr ::= term ([-+*/] term)*
term ::= num | "(" " "? expr ")" " "?
num  ::= [0-9]+ [ ]?
"#;

const CHESS: &str = r#"
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | piece | castle) [+#]?
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
piece  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
castle ::= "O-O" "-O"?
"#;

const C_LIKE: &str = r#"
root       ::= statement+
statement  ::= name " = " expression ";\n" | "if (" expression ") {\n" statement* "}\n" | "return " expression ";\n"
expression ::= unary (" " ("+" | "-" | "==" | "=" "<") " " unary)*
unary      ::= "-"? (name | number | call | "(" expression ")")
call       ::= name "(" (expression ("," " "? expression)*)? ")"
name       ::= [a-zA-Z_] [a-zA-Z_0-9]*
number     ::= [0-9]+
"#;

#[test]
fn gbnf_grammars_accept_valid_texts_and_refuse_others() {
    let grammars = grammars();
    let cases: &[(&str, &[&str], &[&str])] = &[
        (
            JSON,
            &[
                "{}",
                "[1, -2.5e+3, \"a\\u00fF½\"]",
                "{\"a\":{\"b\": [null, true ]}}",
                "0",
                "\"\\\\\"",
                "{\n\t\"a\": 1}",
            ],
            &["", "{", "01", "[1,]", "\"\\x\"", "{\"a\"}", "\"a\nb\"", "\"\\u00f\"", "  1", "nul"],
        ),
        (
            SCHEMA,
            &["{\"name\": \"name\"}", "{ \"name\":\"\",\"next\": {\"name\":\"a, b\"} }\n"],
            &["{}", "{\"names\": \"x\"}", "{\"name\": \"x\", \"name\": \"y\"}", "{\"name\": x}"],
        ),
        (ARITHMETIC, &["1+2=3\n", "(1 *(2-3 ))/4= 5 \n6=6\n"], &["1+=2\n", "1=2", "(1=2\n", "1  =2\n"]),
        (
            CHESS,
            &["1. e4 e5\n2. Nf3 Nc6\n", "1. exd5 O-O-O\n23. Qh4xe1# e8=Q+\n4. R1a3 Nbd7\n"],
            &["1. e4 e5\n", "1. e9 e5\n2. a3 a4\n", "1. e4 e5\n2. O-O-O-O a3\n", "1. e4 e5\n023. a3 a4\n"],
        ),
        (
            C_LIKE,
            &[
                "a = -b + 12;\n",
                "if (f(x,y, 3) == g()) {\nreturn (a);\n}\n",
                "iff = 1;\n",
                "if (a) {\n}\nreturn = 1;\n",
            ],
            &["a = ;\n", "if (a) {\n", "a == b;\n", "1a = 2;\n", "f( = 1;\n"],
        ),
        (
            "root ::= item+\nitem ::= \"- \" [^\\n]+ \"\\n\"",
            &["- a\n", "- a\n- ½ - c\n"],
            &["", "- \n", "- a", "a\n", "- a\n\n"],
        ),
        (
            "root ::= [α-ω\\u3041-\\u309F\\U0001F600-\\U0001F64F]+ \"½\" [^\\x00-\\x7F]",
            &["αω½é", "ぁゟ😀½½", "\u{3041}½\u{10FFFF}"],
            &["½é", "a½é", "α½a", "α½éé", "Α½é"],
        ),
        (
            r#"root ::= "\x41\t\r\n\\\"\[\]½\U0001F600" [\]\[\\\-"^] [a-] [-a]"#,
            &["A\t\r\n\\\"[]½😀]a-", "A\t\r\n\\\"[]½😀^-a", "A\t\r\n\\\"[]½😀--a"],
            &["A\t\r\n\\\"[]½😀aa-", "A\t\r\n\\\"[]½😀]b-"],
        ),
        (
            "root ::= \"a\"{3} \"b\"{2,} \"c\"{0,2} \"d\" {1} \"e\"{0} \"f\"{0,0}",
            &["aaabbd", "aaabbbbccd"],
            &["aabbd", "aaabd", "aaabbcccd", "aaabbde"],
        ),
        (
            "root ::= (\"ab\" | \"c\"){2,3} [0-9]{2}",
            &["abc12", "ccab00"],
            &["ab12", "cccc12", "cc1", "aab12"],
        ),
        ("root ::= .{2} \"x\" .?", &["½\nx", "xxx", "abxx"], &["ax", "abc", "abxxx"]),
        // The longest match leads to a dead end here.
        (
            "root ::= list\nlist ::= \"ab\" \"d\" | \"a\" \"bc\" | \"(\" list \")\"",
            &["abc", "abd", "((abc))"],
            &["ab", "abcd", "(abc"],
        ),
        ("root ::= n [0-9] | \"(\" root \")\"\nn ::= [0-9]+", &["12", "(123)"], &["1", "(1)"]),
        (
            "root ::= s \"!\"\ns ::= \"(\" s \")\" | ws \"a\" ws\nws ::= \" \"* ",
            &["  a  !", "(( a))!"],
            &["a", "  !"],
        ),
        (
            "root ::= a a\na ::= \"x\"* \"y\"? b?\nb ::= \"(\" a \")\"",
            &["", "xyxxy", "xx(y)x", "((x))y"],
            &["yyy", "(", "xyxyx"],
        ),
        // White space: a rule continues on the next line inside a group and after a bar, a comment ends with its line,
        // and names may have upper case, digits, hyphens and underscores.
        (
            "\r\n# first\r\nroot ::=\n  \"a\" | # or\n  (\n\"b\"\n  # and\n \"c\" )\r\n\n\n  x-Y_2::=\"d\"",
            &["a", "bc"],
            &["d", "b c", "b\nc"],
        ),
        ("root ::= Upper-CASE|\n\"\"\nUpper-CASE::=[x]\n", &["", "x"], &["X"]),
        ("root ::= (((\"a\")?)*)+ | ((((()))))", &["", "aaa"], &["b"]),
        ("root ::= \"start: /x/ %ignore\" \"\"", &["start: /x/ %ignore"], &["start:/x/%ignore"]),
    ];
    for (grammar, good, bad) in cases {
        assert_language(&grammars, &gbnf(grammar), good, bad);
    }
}

#[test]
fn an_invalid_grammar_is_refused_with_line_and_column() {
    let grammars = grammars();
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(200), ")".repeat(200));
    let starred = format!("root ::= \"a\"{}", "*".repeat(200));
    let cases = [
        ("", "line 1, column 1: expected a rule with the name \"root\", found the end"),
        ("a ::= \"x\"\n", "line 2, column 1: expected a rule with the name \"root\", found the end"),
        ("root = \"a\"", "line 1, column 6: expected \"::=\", found '='"),
        ("root\n::= \"a\"", "line 1, column 5: expected \"::=\", found '\\n'"),
        ("# ½\n  ½ ::= \"a\"", "line 2, column 3: expected the name of a rule, found '½'"),
        (
            "root ::= \"½\" )",
            "line 1, column 14: expected a part of a rule, or the end of the line, found ')'",
        ),
        (
            "root ::= \"a\" b ::= \"c\"",
            "line 1, column 16: expected a part of a rule, or the end of the line, found ':'",
        ),
        ("root ::= (\"a\"\n\"b\"", "line 2, column 4: expected a part of a rule, or \")\", found the end"),
        ("root ::= \"a", "line 1, column 12: expected a character, or the closing '\"', found the end"),
        ("root ::= [a", "line 1, column 12: expected a character, or the closing ']', found the end"),
        ("root ::= [a-", "line 1, column 13: expected the last character of the range, found the end"),
        ("root ::= []", "line 1, column 10: expected a class of at least one character"),
        ("root ::= [^\\x00-\\U0010FFFF]", "line 1, column 10: expected a class of at least one character"),
        ("root ::= [z-a]", "line 1, column 11: expected a range whose end is not before its start"),
        ("root ::= \"\\q\"", "line 1, column 11: expected an escape: one of"),
        ("root ::= \"\\", "line 1, column 12: expected an escape, found the end"),
        ("root ::= \"\\x4g\"", "line 1, column 13: expected 2 hexadecimal digits, found '4'"),
        ("root ::= \"\\u12½\"", "line 1, column 13: expected 4 hexadecimal digits, found '1'"),
        ("root ::= \"a\\ud800\"", "line 1, column 12: expected the code point of a character"),
        ("root ::= \"\\U00110000\"", "line 1, column 11: expected the code point of a character"),
        ("root ::= * \"a\"", "line 1, column 10: expected something to repeat before it, found '*'"),
        ("root ::= (\n+)", "line 2, column 1: expected something to repeat before it, found '+'"),
        ("root ::= \"a\"{x}", "line 1, column 14: expected a number of repetitions, found 'x'"),
        ("root ::= \"a\"{,2}", "line 1, column 14: expected a number of repetitions, found ','"),
        ("root ::= \"a\"{1,x}", "line 1, column 16: expected a number of repetitions, or \"}\", found 'x'"),
        ("root ::= \"a\"{1", "line 1, column 15: expected \"}\", found the end"),
        (
            "root ::= \"a\"{3,2}",
            "line 1, column 13: expected a repetition whose first number is not larger than the second",
        ),
        ("root ::= \"a\"{2001}", "line 1, column 14: expected at most 2000 repetitions"),
        ("root ::= \"a\"{0,99999999999}", "line 1, column 16: expected at most 2000 repetitions"),
        (
            "root ::= <think> \"a\"",
            "line 1, column 10: expected text, found a token; token literals are not supported",
        ),
        (
            "root ::= !<[7]>",
            "line 1, column 10: expected text, found a token; token literals are not supported",
        ),
        ("root ::= a\na ::= b | c", "line 2, column 7: the rule \"b\" is not defined"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: the rule \"root\" is defined twice"),
        (
            "root ::= \"x\" e\ne ::= e \"+\" | \"1\"",
            "line 2, column 1: the rule \"e\" begins with itself; left recursion",
        ),
        (
            "root ::= a\na ::= \"x\"? b\nb ::= \"\" (a)+ \"y\"",
            "line 2, column 1: the rule \"a\" begins with itself",
        ),
        (&deep, "expected groups and repetitions that nest less deeply"),
        (&starred, "expected groups and repetitions that nest less deeply"),
    ];
    for (grammar, expected) in cases {
        let problem = refusal(&grammars, &gbnf(grammar));
        assert!(problem.contains(expected) && problem.len() < 200, "{grammar}: {problem}");
    }
    assert_eq!(grammars.compiled(), 0);
}

#[test]
fn the_size_of_a_converted_grammar_is_limited() {
    let grammars = grammars();
    let long = format!("root ::= \"{}\"", "a".repeat(MAX_GRAMMAR_BYTES));
    assert!(refusal(&grammars, &gbnf(&long)).contains("at most 262144 are accepted"));
    // Every character takes six bytes in Lark.
    let long = format!("root ::= \"{}\"", "-".repeat(MAX_GRAMMAR_BYTES / 2));
    let problem = refusal(&grammars, &gbnf(&long));
    assert!(problem.contains("as Lark, at most 262144 are accepted"), "{problem}");
    // GBNF and Lark have different syntax, so the request field decides which of them is parsed.
    let same = "start: \"a\"";
    assert!(accepts(&grammars, &GrammarSource::Lark(same.into()), "a"));
    assert!(refusal(&grammars, &gbnf(same)).contains("\"::=\""));
}

/// The right side of a rule.
#[derive(Clone, Debug)]
enum Expr {
    Text(&'static str),
    /// A class as it is written, and which characters of [`LETTERS`] it contains.
    Class(&'static str, &'static str),
    Rule(usize),
    Seq(Vec<Expr>),
    Alt(Vec<Expr>),
    Repeat(Box<Expr>, usize, Option<usize>),
}

/// The characters of all random grammars.
const LETTERS: &str = "abc½(\"";

impl Expr {
    /// A random part of rule `own` of `rules`. It can begin only with later rules, so there is no left recursion.
    fn random(rng: &mut ChaCha8Rng, depth: usize, own: usize, rules: usize) -> Self {
        let inner = |rng: &mut ChaCha8Rng| Self::random(rng, depth.saturating_sub(1), own, rules);
        match rng.random_range(0..if depth == 0 { 3 } else { 10 }) {
            0 | 1 => Self::Text(["a", "b", "ab", "abc", "½", "\"", "(", "", "cab"].choose(rng).unwrap()),
            2 => {
                let classes = [
                    ("[a-c]", "abc"),
                    ("[^a-c]", "½(\""),
                    ("[ab½]", "ab½"),
                    (".", LETTERS),
                    ("[\"(]", "(\""),
                ];
                let (written, of) = classes.choose(rng).unwrap();
                Self::Class(written, of)
            }
            3 if own + 1 < rules => Self::Rule(rng.random_range(own + 1..rules)),
            // After a character, any rule may follow without left recursion. The second alternative ends the recursion.
            4 => Self::Alt(vec![
                Self::Seq(vec![Self::Text("("), Self::Rule(rng.random_range(0..rules)), inner(rng)]),
                inner(rng),
            ]),
            5 => Self::Alt((0..rng.random_range(2..4)).map(|_| inner(rng)).collect()),
            6 | 7 => {
                let (least, span) = (rng.random_range(0..3), rng.random_range(0..3));
                let most = rng.random::<bool>().then_some(least + span);
                Self::Repeat(Box::new(inner(rng)), least, most)
            }
            _ => Self::Seq((0..rng.random_range(2..4)).map(|_| inner(rng)).collect()),
        }
    }

    /// Writes the expression as part of another one.
    fn write(&self, out: &mut String) {
        let each = |exprs: &[Expr], between: &str, out: &mut String| {
            out.push('(');
            for (i, expr) in exprs.iter().enumerate() {
                *out += if i == 0 { "" } else { between };
                expr.write(out);
            }
            out.push(')');
        };
        match self {
            Self::Text(text) => write!(out, "{text:?}").unwrap(),
            Self::Class(written, _) => *out += written,
            Self::Rule(0) => *out += "root",
            Self::Rule(rule) => write!(out, "Rule-{rule}").unwrap(),
            Self::Seq(exprs) => each(exprs, " ", out),
            Self::Alt(exprs) => each(exprs, "|", out),
            Self::Repeat(expr, least, most) => {
                expr.write(out);
                match (least, most) {
                    (0, None) => *out += "*",
                    (1, None) => *out += "+",
                    (0, Some(1)) => *out += "?",
                    (_, None) => write!(out, "{{{least},}}").unwrap(),
                    (_, Some(most)) if most == least => write!(out, "{{{most}}}").unwrap(),
                    (_, Some(most)) => write!(out, "{{{least},{most}}}").unwrap(),
                }
            }
        }
    }

    /// All positions where a text that begins at `from` may end.
    fn ends(&self, rules: &[Expr], text: &[char], from: usize) -> BTreeSet<usize> {
        let then = |ends: &BTreeSet<usize>, expr: &Expr| -> BTreeSet<usize> {
            ends.iter().flat_map(|end| expr.ends(rules, text, *end)).collect()
        };
        match self {
            Self::Text(said) => {
                let said: Vec<char> = said.chars().collect();
                BTreeSet::from_iter(text[from..].starts_with(&said).then_some(from + said.len()))
            }
            Self::Class(_, of) => {
                BTreeSet::from_iter(text.get(from).filter(|c| of.contains(**c)).map(|_| from + 1))
            }
            Self::Rule(rule) => rules[*rule].ends(rules, text, from),
            Self::Seq(exprs) => exprs.iter().fold([from].into(), |ends, expr| then(&ends, expr)),
            Self::Alt(exprs) => exprs.iter().flat_map(|expr| expr.ends(rules, text, from)).collect(),
            Self::Repeat(expr, least, most) => {
                let mut ends = BTreeSet::from([from]);
                for _ in 0..*least {
                    ends = then(&ends, expr);
                }
                let mut fresh = ends.clone();
                for _ in 0..most.map_or(usize::MAX, |most| most - least) {
                    fresh = &then(&fresh, expr) - &ends;
                    if fresh.is_empty() {
                        break;
                    }
                    ends.extend(&fresh);
                }
                ends
            }
        }
    }

    /// Appends a random text that the expression accepts. `depth` limits how deeply rules nest.
    fn say(&self, rules: &[Expr], rng: &mut ChaCha8Rng, depth: usize, out: &mut String) {
        match self {
            Self::Text(text) => *out += text,
            Self::Class(_, of) => out.push(*of.chars().collect::<Vec<_>>().choose(rng).unwrap()),
            Self::Rule(rule) => rules[*rule].say(rules, rng, depth.saturating_sub(1), out),
            Self::Seq(exprs) => exprs.iter().for_each(|expr| expr.say(rules, rng, depth, out)),
            // The last alternative always ends the recursion.
            Self::Alt(exprs) if depth == 0 => exprs.last().unwrap().say(rules, rng, depth, out),
            Self::Alt(exprs) => exprs.choose(rng).unwrap().say(rules, rng, depth, out),
            Self::Repeat(expr, least, most) => {
                let more = if depth == 0 { 0 } else { most.map_or(2, |most| most - least) };
                for _ in 0..least + rng.random_range(0..=more) {
                    expr.say(rules, rng, depth, out);
                }
            }
        }
    }
}

fn random_grammar(rng: &mut ChaCha8Rng) -> (Vec<Expr>, String) {
    let n = rng.random_range(1..5);
    let rules: Vec<Expr> = (0..n).map(|own| Expr::random(rng, 3, own, n)).collect();
    let mut written = String::new();
    for (i, rule) in rules.iter().enumerate() {
        Expr::Rule(i).write(&mut written);
        written += " ::= ";
        rule.write(&mut written);
        written += if rng.random() { "\n" } else { "  # ends here\r\n\n" };
    }
    (rules, written)
}

#[test]
fn random_grammars_accept_their_own_texts_and_no_others() {
    let seed = 0x6b4f;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (grammars, tokenizer) = (grammars(), tokenizer());
    let letters: Vec<char> = LETTERS.chars().collect();
    let (mut accepted, mut refused) = (0, 0);
    let all = rounds(400);
    for i in 0..all {
        let (rules, written) = random_grammar(&mut rng);
        let grammar = grammars.compile(&gbnf(&written)).unwrap_or_else(|e| panic!("{i}: {written}{e}"));
        for _ in 0..6 {
            let mut text = String::new();
            rules[0].say(&rules, &mut rng, 4, &mut text);
            if text.len() > 40 {
                continue;
            }
            let mut characters: Vec<char> = text.chars().collect();
            assert!(
                rules[0].ends(&rules, &characters, 0).contains(&characters.len()),
                "{i}: {written}{text:?}"
            );
            assert!(accepts(&grammars, &gbnf(&written), &text), "{i}: {written}refuses {text:?}");
            let at = rng.random_range(0..=characters.len());
            match rng.random_range(0..3) {
                0 => characters.insert(at, *letters.choose(&mut rng).unwrap()),
                1 if at < characters.len() => drop(characters.remove(at)),
                _ => characters.truncate(at),
            }
            let text: String = characters.iter().collect();
            let expected = rules[0].ends(&rules, &characters, 0).contains(&characters.len());
            assert_eq!(accepts(&grammars, &gbnf(&written), &text), expected, "{i}: {written}{text:?}");
            if expected { accepted += 1 } else { refused += 1 }
        }
        // Generate a random answer that the masks allow.
        let mut constraint = grammar.start();
        let mut ids = Vec::new();
        while ids.len() < 16 {
            let choices = allowed(&constraint.mask(true).unwrap_or_else(|e| panic!("{i}: {written}{e}")));
            let id = *choices.choose(&mut rng).unwrap();
            if STOPS.contains(&id) {
                let text: Vec<char> = tokenizer.decode(&ids, true).chars().collect();
                // `Expr` knows only the characters in `LETTERS`, so other texts are not checked.
                if text.iter().all(|c| letters.contains(c)) {
                    assert!(rules[0].ends(&rules, &text, 0).contains(&text.len()), "{i}: {written}{text:?}");
                }
                break;
            }
            constraint.push(id).unwrap();
            ids.push(id);
        }
    }
    assert!(
        4 * accepted > all && 4 * refused > 3 * all,
        "{accepted} accepted, {refused} refused: one of them is too rare"
    );
}

#[test]
fn mutated_grammars_never_panic_or_hang() {
    let seed = 0x6b4e;
    println!("seed {seed}");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let rule = "\n a ::= ";
    let junk = [
        "::=", "root", "|", "(", ")", "*", "+", "?", "{2}", "{0,3}", "{1999}", "[", "]", "^", "-", "\"",
        "\\", "\\x", "\\u0041", ".", "<", "!", "#", "\n", "\r\n", "½", "\0", " ", "a", "ws", "value", "expr",
        rule,
    ];
    let valid = [JSON, SCHEMA, ARITHMETIC, CHESS, C_LIKE];
    let (mut compiled, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut grammar: Vec<char> = valid.choose(&mut rng).unwrap().chars().collect();
        for _ in 0..rng.random_range(1..5) {
            let at = rng.random_range(0..grammar.len());
            let end = (at + rng.random_range(0..4)).min(grammar.len());
            match rng.random_range(0..3) {
                0 => drop(grammar.drain(at..end)),
                1 => drop(grammar.splice(at..end, junk.choose(&mut rng).unwrap().chars())),
                _ => grammar.splice(at..at, junk.choose(&mut rng).unwrap().chars()).for_each(drop),
            }
        }
        let grammar: String = grammar.into_iter().collect();
        if fuzz_bodies::gbnf(grammar.into_bytes()) { compiled += 1 } else { refused += 1 }
    }
    assert!(compiled > 300 && refused > 300, "{compiled} compiled, {refused} refused");
}

#[test]
fn large_grammars_compile_or_are_refused_with_a_short_error() {
    let grammars = grammars();
    let chain = |n: usize, rule: fn(usize) -> String| {
        let rules: String = (0..n).map(|i| format!("r{i} ::= {}\n", rule(i + 1))).collect();
        format!("root ::= r0\n{rules}r{n} ::= \"a\"")
    };
    let many: String = (0..9000).map(|i| format!("\"{i}\" | ")).collect();
    for grammar in [
        chain(9000, |next| format!("r{next}")),
        chain(5000, |next| format!("r{next} r{next}")),
        chain(5000, |next| format!("r{next}? \"b\" root?")),
        chain(5000, |next| format!("\"(\" root \")\" | r{next}")),
        format!("root ::= {many} \"x\""),
        format!("root ::= {many} \"(\" root \")\""),
        format!("root ::= {} root?", "[a-z]? ".repeat(9000)),
        "root ::= (((\"a\"{2000}){2000}){2000}){2000}".to_owned(),
        "root ::= (((\"a\"{1,2000}){1,2000}){1,2000}){1,2000} root?".to_owned(),
        "root ::= [ab]* \"a\" [ab]{200}".to_owned(),
        format!("root ::= {} \"x\" root?\na ::= \"x\"? | \"y\"", "a ".repeat(60_000)),
        "root ::= \"(\"* root? \")\"*".replace("root?", "(\"x\" root)?"),
        (0x4e00..0x9000)
            .map(|c| format!("\"{}\"?", char::from_u32(c).unwrap()))
            .fold("root ::= ".into(), |all, next| all + &next),
    ] {
        // On a busy machine, the first mask can exceed its time too.
        match grammars.compile(&gbnf(&grammar)).and_then(|grammar| grammar.start().mask(true).map(drop)) {
            Ok(()) => {}
            Err(TextError::Grammar(problem)) => assert!(problem.len() < 200, "{problem}"),
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// Free text in a string is a single terminal, so it costs as little as in a JSON schema.
#[test]
fn grammars_accept_long_free_text_with_the_real_vocabulary() {
    let Some(json) = real_tokenizer_json() else { return support::skip("real-tokenizer") };
    let tokenizer = Tokenizer::from_bytes(&json, "tokenizer.json").unwrap();
    let grammars = Grammars::new(tokenizer.clone(), 262_208, &STOPS);
    let words = "All of this is free text, and it goes on for quite some time. ".repeat(20);
    let cases = [
        (JSON, format!("{{\"a\": [\"{words}\", {{\"b\": -12.5e3}}]}}")),
        (SCHEMA, format!("{{\"name\": \"{words}\", \"next\": {{\"name\": \"{words}\"}}}}")),
    ];
    for (grammar, text) in cases {
        let mut constraint = grammars.compile(&gbnf(grammar)).unwrap().start();
        for id in tokenizer.encode(&text, false).unwrap() {
            let mask = constraint.mask(true).unwrap_or_else(|e| panic!("{grammar}{e}"));
            assert!(allowed(&mask).contains(&id));
            constraint.push(id).unwrap();
        }
        assert!(allowed(&constraint.mask(true).unwrap()).contains(&STOPS[0]));
    }
}
