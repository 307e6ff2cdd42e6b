//! Layers of configuration: which layer has precedence, and what an error names.

use std::collections::BTreeSet;

use unicorn::config::{
    Config, ConfigError, DEFAULT_TOML, FfnHeap, Layer, Memory, SharePrefixes, UserFolder, parse_bytes,
    show_bytes,
};
use unicorn::tensor::QuantizeMode;

use crate::support::lists::words;

fn from_file(text: &str) -> Result<Config, ConfigError> {
    Config::from_layers(&[Layer::file("unicorn.toml", text)?])
}

#[test]
fn the_defaults_are_those_of_the_documented_file() {
    let config = Config::from_layers(&[]).expect("valid");
    assert_eq!((config.server.host.as_str(), config.server.port), ("127.0.0.1", 8010));
    assert_eq!((config.model.path, config.engine.context), (None, None));
    assert!(!config.hardware.allow_software_vulkan, "software Vulkan must not be a default");
    assert!(!config.hardware.validation, "validation slows every call and must not be a default");
    assert!(config.hardware.strict, "by default, a model that is not in memory must not be served");
    assert_eq!(config.kv.share_prefixes, None, "by default, it depends on the number of API keys");
    assert_eq!(config.memory, Memory { vram: None, gtt: None, reserve: None, ffn_heap: FfnHeap::Auto });
}

/// The sections of a file, with those inside others as `section.section`.
fn sections(file: &toml::Table) -> toml::Table {
    let mut all = toml::Table::new();
    for (section, options) in file {
        let (inner, own): (toml::Table, toml::Table) = options
            .as_table()
            .expect("a section")
            .clone()
            .into_iter()
            .partition(|(_, value)| value.is_table());
        all.insert(section.clone(), own.into());
        all.extend(inner.into_iter().map(|(name, options)| (format!("{section}.{name}"), options)));
    }
    all
}

/// A field of a type `Option` could be missing in the file, and would then be an option that nothing documents.
#[test]
fn every_field_of_the_configuration_is_in_the_documented_file() {
    let defaults = sections(&DEFAULT_TOML.parse().expect("TOML"));
    let names = |table: &toml::Table| table.keys().cloned().collect::<BTreeSet<_>>();
    // The error for an unknown field lists the known ones.
    let fields = |text: &str| {
        let error = toml::from_str::<Config>(text).expect_err("an unknown field");
        error.message().split('`').skip(3).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(fields("'?' = 1"), names(&defaults));
    for (section, options) in &defaults {
        let options = options.as_table().expect("a section");
        assert_eq!(fields(&format!("['{section}']\n'?' = 1")), names(options), "{section}");
    }
}

#[test]
fn a_section_in_a_section_is_read_in_every_layer() {
    let file = Layer::file("a file", "[kv]\nblock_size = 8\n[kv.disk]\npath = '/a'\nmax_bytes = '2GiB'")
        .expect("TOML");
    let variable = ("UNICORN_KV_DISK_PATH".to_owned(), "/b".to_owned());
    let (environment, warnings) = Layer::environment([variable]).expect("an option");
    assert!(warnings.is_empty(), "{warnings:?}");
    let config = Config::from_layers(&[file.clone(), environment]).expect("valid");
    assert_eq!((config.kv_disk.path.as_deref(), config.kv_disk.max_bytes), (Some("/b"), 2 << 30));
    assert_eq!(config.kv.block_size, 8);
    let again = Config::from_toml(&config.to_toml()).expect("the options of another process");
    assert_eq!(again, config);
    assert!(config.describe(&[file]).contains("[kv.disk]\n"), "a section as a file has it");
    let error = from_file("[kv.disk]\npaht = '/a'").expect_err("a misspelt option").to_string();
    assert!(error.contains("kv.disk.path"), "{error}");
    let error = from_file("[kv.disk]\nmax_bytes = '3'").expect_err("too few bytes").to_string();
    assert!(error.contains("kv.disk.max_bytes"), "{error}");
}

#[test]
fn a_value_of_another_type_is_refused_in_words() {
    for (text, expected) in [
        (
            "[server]\nport = 70000",
            "server.port: invalid value: integer `70000`, expected a whole number from 0 to 65535",
        ),
        (
            "[server]\nport = \"80\"",
            "server.port: invalid type: string \"80\", expected a whole number from 0 to 65535",
        ),
        (
            "[server]\nqueue = -1",
            "server.queue: invalid value: integer `-1`, expected a whole number, not negative",
        ),
        ("[memory]\nvram = 16", "memory.vram: expected a size in quotes, such as \"16GiB\", got 16"),
        ("[models]\nserve = 3", "models.serve: invalid type: integer `3`, expected a list"),
    ] {
        let error = from_file(text).expect_err(text).to_string();
        assert!(error.ends_with(expected), "{error}");
    }
}

#[test]
fn share_prefixes_is_key_or_all() {
    for (text, share) in [("", None), ("key", Some(SharePrefixes::Key)), ("all", Some(SharePrefixes::All))] {
        let config = from_file(&format!("[kv]\nshare_prefixes = \"{text}\"")).expect("valid");
        assert_eq!(config.kv.share_prefixes, share, "{text}");
    }
}

#[test]
fn courtesy_is_a_share_from_one_tenth_to_one() {
    for (text, share) in [("0.1", 0.1), ("0.5", 0.5), ("1", 1.0), ("1.0", 1.0)] {
        let config = from_file(&format!("[engine]\ncourtesy = {text}")).expect("valid");
        assert_eq!((config.engine.courtesy.share(), config.engine.courtesy.is_bound()), (share, share < 1.0));
        let variable = [("UNICORN_ENGINE_COURTESY".to_owned(), text.to_owned())];
        let (env, _) = Layer::environment(variable).expect("a number");
        let config = Config::from_layers(&[env]).expect("valid");
        assert_eq!(config.engine.courtesy.share(), share);
        // The device process gets its configuration as TOML.
        assert_eq!(Config::from_toml(&config.to_toml()).expect("valid").engine, config.engine);
    }
    assert!(!Config::from_layers(&[]).expect("valid").engine.courtesy.is_bound(), "no limit by default");
    for text in ["0.09", "0", "-0.5", "1.01", "nan", "inf", "\"half\"", "true"] {
        let error = from_file(&format!("[engine]\ncourtesy = {text}")).expect_err(text).to_string();
        assert!(error.starts_with("unicorn.toml: engine.courtesy: "), "{error}");
    }
    let error = from_file("[engine]\ncourtesy = 0.05").expect_err("too little").to_string();
    assert!(error.contains("from 0.1 to 1, got 0.05; 1 = no limit"), "{error}");
    let half = [("UNICORN_ENGINE_COURTESY".to_owned(), "half".to_owned())];
    let error = Layer::environment(half).expect_err("no number").to_string();
    assert!(error.contains("expected a number, got \"half\""), "{error}");
}

#[test]
fn later_layers_have_precedence() {
    let file =
        Layer::file("f", "[server]\nport = 1\nqueue = 7\n[model]\nquantize = \"int8-row\"").expect("TOML");
    let variables = [("UNICORN_SERVER_PORT", "2"), ("UNICORN_TEST_OF_OTHERS", "x"), ("HOME", "/")];
    let (env, warnings) = Layer::environment(variables.map(|(k, v)| (k.into(), v.into()))).expect("known");
    assert_eq!(warnings, [""; 0], "variables for tests are known");
    let mut flags = Layer::flags();
    flags.set("server.host", "::1");
    let config = Config::from_layers(&[file, env, flags]).expect("valid");
    assert_eq!((config.server.host.as_str(), config.server.port, config.server.queue), ("::1", 2, 7));
    assert_eq!(config.model.quantize, QuantizeMode::Int8Row);
}

#[test]
fn errors_name_the_option_and_its_source() {
    for (text, parts) in [
        ("[server]\nprt = 1", &["unicorn.toml", "option server.prt; did you mean server.port?"][..]),
        ("[sever]\nport = 1", &["unicorn.toml", "option sever.port; did you mean server.port?"]),
        ("port = 1", &["unicorn.toml", "option port; did you mean server.port?"]),
        ("[server]\ncontext = 1", &["unicorn.toml", "option server.context; did you mean engine.context?"]),
        (
            "[server]\nmodle = \"x\"",
            &["unicorn.toml", "option server.modle; expected one of", "host, idle_timeout_s"],
        ),
        (
            "[gpus]\nwatts = 1",
            &["unicorn.toml", "option gpus.watts; expected one of", "engine, gpu, hardware"],
        ),
        ("[colour]", &["unicorn.toml", "option colour; expected one of"]),
        ("server = 1", &["unicorn.toml", "server", "section"]),
        ("[server]\nport = 65536", &["unicorn.toml", "server.port", "65536"]),
        ("[server]\nport = \"x\"", &["unicorn.toml", "server.port", "string"]),
        ("[server]\nqueue = 0", &["unicorn.toml", "server.queue", "1 to 4096"]),
        ("[engine]\ncontext = -1", &["unicorn.toml", "engine.context"]),
        ("[model]\nquantize = \"int3\"", &["unicorn.toml", "model.quantize", "int3", "int8-row"]),
        ("[kv]\ndtype = \"fp8\"", &["unicorn.toml", "kv.dtype", "fp8", "auto, f16, int8, f32"]),
        ("[kv]\nshare_prefixes = \"none\"", &["unicorn.toml", "kv.share_prefixes", "none", "key, all"]),
        ("[memory]\nvram = \"16GB\"", &["unicorn.toml", "memory.vram", "16GB", "16GiB"]),
        ("[memory]\nreserve = 5", &["unicorn.toml", "memory.reserve", "a size in quotes"]),
        ("[memory]\nffn_heap = \"host\"", &["unicorn.toml", "memory.ffn_heap", "host", "auto, gtt, vram"]),
        ("[log]\nlevel = \"loud\"", &["unicorn.toml", "log.level", "loud", "info"]),
        ("[log]\nformat = \"xml\"", &["unicorn.toml", "log.format", "xml", "text, json, journal"]),
        ("[server", &["unicorn.toml", "TOML"]),
    ] {
        let message = from_file(text).expect_err(text).to_string();
        assert!(!message.contains('\n'), "{message:?}");
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
    let error = environment("UNICORN_SERVER_PORT", "http").expect_err("no number").to_string();
    assert!(error.contains("UNICORN_SERVER_PORT") && error.contains("integer"), "{error}");
}

#[test]
fn every_option_is_shown_with_the_source_of_its_value() {
    let one = Layer::file("one.toml", "[server]\nport = 1\nqueue = 7").expect("TOML");
    let other = Layer::file("other.toml", "[server]\nport = 2\nmodel_aliases = [\"a # b\"]").expect("TOML");
    let (environment, _) = environment("UNICORN_ENGINE_CONTEXT", "512").expect("an option");
    let mut flags = Layer::flags();
    flags.set("server.host", "::1");
    let layers = [one, other, environment, flags];
    let config = Config::from_layers(&layers).expect("valid");
    let shown = config.describe(&layers);
    for (option, source) in [
        ("port = 2", "other.toml"),
        ("queue = 7", "one.toml"),
        ("model_aliases = [\"a # b\"]", "other.toml"),
        ("context = 512", "environment"),
        ("host = \"::1\"", "command line"),
        ("connections = 512", "default"),
    ] {
        let is_it =
            |line: &str| line.strip_prefix(option).is_some_and(|rest| rest.trim() == format!("# {source}"));
        assert!(shown.lines().any(is_it), "{option} of {source} is not in\n{shown}");
    }
    assert_eq!(from_file(&shown).expect("what is shown can be read"), config);
}

#[test]
fn the_users_folders_follow_the_xdg_base_directories() {
    let path = |folder: UserFolder, set: &[(&str, &str)]| {
        let value = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into());
        folder.path(value).map(|path| path.display().to_string())
    };
    let (home, xdg) = (("HOME", "/h"), ("XDG_STATE_HOME", "/s"));
    for (folder, set, expected) in [
        (UserFolder::State, &[home][..], Some("/h/.local/state/unicorn")),
        (UserFolder::State, &[home, xdg], Some("/s/unicorn")),
        (UserFolder::State, &[home, xdg, ("UNICORN_STATE_DIR", "/own")], Some("/own")),
        (
            UserFolder::State,
            &[home, ("XDG_STATE_HOME", ""), ("UNICORN_STATE_DIR", "")],
            Some("/h/.local/state/unicorn"),
        ),
        (UserFolder::Cache, &[home, xdg], Some("/h/.cache/unicorn")),
        (UserFolder::Cache, &[("UNICORN_CACHE_DIR", "/own")], Some("/own")),
        (UserFolder::State, &[], None),
    ] {
        assert_eq!(path(folder, set).as_deref(), expected, "{folder:?} {set:?}");
    }
}

fn environment(variable: &str, value: &str) -> Result<(Layer, Vec<String>), ConfigError> {
    Layer::environment([(variable.to_owned(), value.to_owned())])
}

#[test]
fn a_misspelt_variable_is_an_error_and_an_unknown_one_a_warning() {
    for (variable, meant) in [
        ("UNICORN_SERVER_PRT", "UNICORN_SERVER_PORT"),
        ("UNICORN_SEVER_PORT", "UNICORN_SERVER_PORT"),
        ("UNICORN_SERVER_POTR", "UNICORN_SERVER_PORT"),
        ("UNICORN_SERVERPORT", "UNICORN_SERVER_PORT"),
        ("UNICORN_MODEL_PAHT", "UNICORN_MODEL_PATH"),
        ("UNICORN_KV_DTYP", "UNICORN_KV_DTYPE"),
    ] {
        let error = environment(variable, "1").expect_err(variable).to_string();
        assert!(error.contains(variable) && error.contains(meant), "{error}");
    }
    // Kubernetes sets these variables for services with the names unicorn and unicorn-model.
    for variable in words(
        "UNICORN_PORT UNICORN_SERVICE_HOST UNICORN_SERVICE_PORT UNICORN_PORT_8010_TCP_ADDR \
        UNICORN_MODEL_SERVICE_HOST UNICORN_MODEL_PORT_8010_TCP",
    ) {
        let (layer, warnings) = environment(variable, "tcp://10.0.0.1:8010").expect(variable);
        assert!(matches!(&warnings[..], [warning] if warning.contains(variable)), "{warnings:?}");
        assert_eq!(Config::from_layers(&[layer]), Config::from_layers(&[]), "{variable}");
    }
    // Kubernetes sets this variable for a service with the name unicorn-server. It is also the variable of an option.
    let error = environment("UNICORN_SERVER_PORT", "tcp://10.0.0.1:8010").expect_err("no port").to_string();
    assert!(error.contains("enableServiceLinks"), "{error}");
    for ours in words(
        "UNICORN_CONFIG UNICORN_CACHE_DIR UNICORN_STATE_DIR UNICORN_API_KEYS UNICORN_API_KEY UNICORN_TEST_DEVICE \
        UNICORN_SKIP_LOG HOME",
    ) {
        assert_eq!(environment(ours, "x").expect(ours).1, [""; 0], "{ours}");
    }
}

#[test]
fn a_log_level_without_a_known_level_is_refused() {
    for level in ["", "info", "WARN", "off", "info,unicorn=debug", "unicorn::api=trace"] {
        from_file(&format!("[log]\nlevel = {level:?}")).expect(level);
    }
    for level in ["loud", "info,loud", "unicorn=loud", "5"] {
        let error = from_file(&format!("[log]\nlevel = {level:?}")).expect_err(level).to_string();
        assert!(error.contains("log.level") && error.contains("debug"), "{error}");
    }
}

#[test]
fn sizes_are_read_and_shown_in_binary_units() {
    for (text, bytes) in [
        ("0", 0),
        ("4096", 4096),
        ("12B", 12),
        ("512MiB", 512 << 20),
        (" 16 GiB ", 16 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        ("2TiB", 2 << 40),
        ("16G", 16 << 30),
        ("1.5g", 3 << 29),
        ("512M", 512 << 20),
        ("4k", 4096),
        ("1 T", 1 << 40),
    ] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    let refused = words("GiB G 16Gi 16GB 16gib -1GiB 1e3 1.2.3KiB 2000TiB 99999999999999999999");
    for text in refused.into_iter().chain(["", "16 GiB free"]) {
        assert!(parse_bytes(text).is_err_and(|error| error.contains("16GiB")), "{text:?}");
    }
    let shown = [0, 1023, 1024, 1536, 5 << 20, 16 << 30, 3 << 50].map(show_bytes);
    assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "16.0 GiB", "3072.0 TiB"]);
}
