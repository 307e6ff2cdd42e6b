//! The tokenizers and the chat template that tests share.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use unicorn::text::{ChatFiles, ChatTemplate, Message, TextError, Tokenizer};

use super::{data, root};

/// A file of golden cases.
#[derive(Deserialize)]
struct Cases<T> {
    cases: Vec<T>,
}

/// A case of a byte-level tokenizer.
#[derive(Deserialize)]
pub struct ByteLevelCase {
    pub text: String,
    pub ids: Vec<u32>,
    /// The ids if names of control tokens are text.
    pub ids_no_special: Option<Vec<u32>>,
    pub decoded: String,
    pub decoded_skip_special: String,
}

/// Ids, and their texts.
#[derive(Deserialize)]
pub struct DecodeCase {
    pub ids: Vec<u32>,
    pub decoded: String,
    pub decoded_skip_special: String,
}

/// The golden cases of a file of `tests/data`, at least `least` of them.
pub fn cases<T: DeserializeOwned>(path: &str, least: usize) -> Vec<T> {
    let bytes = fs::read(data(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let Cases { cases } = serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert!(cases.len() >= least, "{path}: {} cases", cases.len());
    cases
}

/// The mini tokenizer: 512 pieces, with the structure of Gemma's tokenizer. Reading it takes longer than most tests.
pub fn tokenizer() -> Tokenizer {
    static MINI: LazyLock<Tokenizer> = LazyLock::new(|| {
        let path = data("tokenizer-mini/tokenizer.json");
        let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Tokenizer::from_bytes(&bytes, "tokenizer.json").expect("a sound tokenizer")
    });
    MINI.clone()
}

/// The mini tokenizer with the token in the places of images, 512, as the models that take images have it.
pub fn image_tokenizer() -> Tokenizer {
    static MINI: LazyLock<Tokenizer> = LazyLock::new(|| {
        let bytes = fs::read(data("tokenizer-mini/tokenizer.json")).expect("a tokenizer");
        let mut file: Value = serde_json::from_slice(&bytes).expect("JSON");
        let token = json!({
            "id": 512, "content": "<image_soft_token>", "special": true, "normalized": false, "single_word": false,
            "lstrip": false, "rstrip": false,
        });
        file["added_tokens"].as_array_mut().expect("a list").push(token);
        Tokenizer::from_bytes(file.to_string().as_bytes(), "tokenizer.json").expect("a sound tokenizer")
    });
    MINI.clone()
}

/// The real Gemma 3 tokenizer.json, if it is available.
pub fn real_tokenizer_json() -> Option<Vec<u8>> {
    let path = match std::env::var_os("UNICORN_REAL_TOKENIZER") {
        Some(path) => PathBuf::from(path),
        None => root().join(".cache/real-tokenizer/tokenizer.json"),
    };
    path.exists().then(|| fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

/// SmolLM2-135M-Instruct, a trained model, if it is available.
pub fn smollm2() -> Option<PathBuf> {
    let path = root().join(".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    path.exists().then_some(path)
}

/// What transformers makes of conversations with tools, for chat templates of llama.cpp's tree.
#[derive(Deserialize)]
pub struct TemplateGoldens {
    /// Variables that every template gets.
    pub variables: Map<String, Value>,
    pub cases: Vec<TemplateCase>,
    pub templates: Vec<GoldenTemplate>,
}

#[derive(Deserialize)]
pub struct TemplateCase {
    pub note: String,
    pub messages: Vec<Message>,
    pub tools: Vec<Value>,
    pub add_generation_prompt: bool,
}

#[derive(Deserialize)]
pub struct GoldenTemplate {
    /// The name of its file in llama.cpp's tree.
    pub name: String,
    pub sha256: String,
    pub bos_token: Option<String>,
    pub eos_token: String,
    /// The syntax of its calls.
    pub syntax: String,
    /// What the template makes of each case. `None` = it cannot render the case.
    pub results: Vec<Option<Rendered>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rendered {
    Rendered(String),
    /// The words with which the template refuses the case.
    Error(String),
}

impl TemplateGoldens {
    pub fn read() -> TemplateGoldens {
        let bytes = fs::read(data("families/template-goldens.json")).expect("goldens");
        let goldens: TemplateGoldens = serde_json::from_slice(&bytes).expect("sound goldens");
        for template in &goldens.templates {
            assert_eq!(template.results.len(), goldens.cases.len(), "{}", template.name);
        }
        goldens
    }
}

/// A file of llama.cpp's tree that tools/fetch_llama_cpp_files.sh fetches, if it is available.
pub fn llama_cpp_file(name: &str) -> Option<PathBuf> {
    let path = root().join(".cache/llama-cpp").join(name);
    path.exists().then_some(path)
}

/// The vocabulary of the real Gemma 4, a GGUF file without weights, if it is available.
pub fn gemma4_vocabulary() -> Option<PathBuf> {
    llama_cpp_file("ggml-vocab-gemma-4.gguf")
}

/// The built-in chat template with Gemma's special tokens.
pub fn gemma_template() -> ChatTemplate {
    ChatTemplate::from_checkpoint(ChatFiles::default(), &tokenizer()).expect("the built-in template compiles")
}

/// The chat template with this source, as a checkpoint's `chat_template.jinja`.
pub fn template(source: impl AsRef<[u8]>) -> Result<ChatTemplate, TextError> {
    let chat_template_jinja = Some(source.as_ref());
    ChatTemplate::from_checkpoint(ChatFiles { chat_template_jinja, ..ChatFiles::default() }, &tokenizer())
}

/// What a template with this source makes of a user's `hi`.
pub fn render(source: &str) -> Result<String, TextError> {
    template(source)?.render(&[Message::new("user", "hi")], true)
}
