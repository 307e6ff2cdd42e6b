//! Layers of configuration: which wins, and what an error names.

use unicorn::config::{Config, ConfigError, Layer};
use unicorn::tensor::QuantizeMode;

fn from_file(text: &str) -> Result<Config, ConfigError> {
    Config::from_layers(&[Layer::file("unicorn.toml", text)?])
}

#[test]
fn the_defaults_are_what_the_file_documents() {
    let config = Config::from_layers(&[]).expect("valid");
    assert_eq!((config.server.host.as_str(), config.server.port), ("127.0.0.1", 8010));
    assert_eq!((config.model.path, config.engine.context), (None, None));
    assert!(!config.hardware.allow_software_vulkan, "software Vulkan is never a default");
    assert!(!config.hardware.validation, "nor is what slows every call");
}

#[test]
fn later_layers_win() {
    let file =
        Layer::file("f", "[server]\nport = 1\nqueue = 7\n[model]\nquantize = \"int8-row\"").expect("TOML");
    let variables = [("UNICORN_SERVER_PORT", "2"), ("UNICORN_TEST_OF_OTHERS", "x"), ("HOME", "/")];
    let env = Layer::environment(variables.map(|(k, v)| (k.into(), v.into()))).expect("known");
    let mut flags = Layer::flags();
    flags.set("server", "host", "::1");
    let config = Config::from_layers(&[file, env, flags]).expect("valid");
    assert_eq!((config.server.host.as_str(), config.server.port, config.server.queue), ("::1", 2, 7));
    assert_eq!(config.model.quantize, QuantizeMode::Int8Row);
}

#[test]
fn errors_name_the_option_and_its_source() {
    for (text, parts) in [
        ("[server]\nprt = 1", &["unicorn.toml", "server.prt", "port"][..]),
        ("[sever]\nport = 1", &["unicorn.toml", "sever", "server"]),
        ("port = 1", &["unicorn.toml", "port", "server"]),
        ("server = 1", &["unicorn.toml", "server", "section"]),
        ("[server]\nport = 65536", &["unicorn.toml", "server.port", "65536"]),
        ("[server]\nport = \"x\"", &["unicorn.toml", "server.port", "string"]),
        ("[server]\nqueue = 0", &["unicorn.toml", "server.queue", "1 to 4096"]),
        ("[engine]\ncontext = -1", &["unicorn.toml", "engine.context"]),
        ("[model]\nquantize = \"int3\"", &["unicorn.toml", "model.quantize", "int3", "int8-row"]),
        ("[server", &["unicorn.toml", "TOML"]),
    ] {
        let message = from_file(text).expect_err(text).to_string();
        assert!(!message.contains('\n'), "{message:?}");
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    for (variable, value) in [("UNICORN_SERVER_PRT", "1"), ("UNICORN_SERVER_PORT", "http")] {
        let error = Layer::environment([(variable.to_owned(), value.to_owned())]).expect_err(variable);
        assert!(error.to_string().contains(variable), "{error}");
    }
}
