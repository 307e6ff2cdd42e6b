//! Commands that ask a running server: `run`, `list`, `ps`, `show`, `stop`, `pull` and `rm`. Without a server, those that can
//! do their work in this process, with the models that this user has pulled.

mod client;
mod run;

use serde_json::{Value, json};
use ureq::http::Method;

use super::args;
use super::error::Error;
use super::log::{note, say};
use super::models;
use super::progress::Bar;
use super::terminal::{bytes, print};
use super::{inspect, names, pull};
use crate::config::Config;
use crate::hub::{HubError, ModelName};
use crate::text::visible;

use client::Client;
pub use client::KEY_VARIABLE;
pub use run::run;

/// The server that a command needs.
fn server(config: &Config, server: &args::RunningServer) -> Result<Client, Error> {
    Client::find(config, server.url.as_deref())?.ok_or_else(|| {
        Error::Argument("no server is running: `unicorn serve` starts one, or --url gives its address".into())
    })
}

/// Rows as a table. The first row has the names of the columns.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |i: usize| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    visible(&rows.iter().map(line).collect::<String>()).into_owned()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// The models of a list.
fn models_of(list: &Value) -> &[Value] {
    list["models"].as_array().map_or(&[], Vec::as_slice)
}

/// Prints rows of a server as JSON.
fn print_json(rows: &Value) -> Result<(), Error> {
    print(&format!("{rows}\n"))
}

/// Lists the models of a server, or the pulled models.
pub fn list(config: &Config, args: &args::List) -> Result<(), Error> {
    let Some(client) = Client::find(config, args.server.url.as_deref())? else {
        return models::list(config, args.json);
    };
    let tags = client.get("/api/tags")?;
    if args.json {
        return print_json(&tags["models"]);
    }
    let running = client.get("/api/ps")?;
    let is_loaded = |name: &Value| models_of(&running).iter().any(|model| model["model"] == *name);
    let mut rows = vec![["NAME", "STATE", "SIZE", "PARAMETERS", "QUANTIZATION"].map(str::to_owned).to_vec()];
    rows.extend(models_of(&tags).iter().map(|model| {
        let state = if is_loaded(&model["model"]) { "loaded" } else { "" };
        vec![
            untagged(&text(&model["name"])),
            state.to_owned(),
            bytes(number(&model["size"])),
            text(&model["details"]["parameter_size"]),
            text(&model["details"]["quantization_level"]),
        ]
    }));
    print(&table(&rows))
}

/// Lists the loaded models of a server.
pub fn ps(config: &Config, args: &args::Ps) -> Result<(), Error> {
    let running = server(config, &args.server)?.get("/api/ps")?;
    if args.json {
        return print_json(&running["models"]);
    }
    let mut rows = vec![["NAME", "DEVICE MEMORY", "CONTEXT", "UNTIL"].map(str::to_owned).to_vec()];
    rows.extend(models_of(&running).iter().map(|model| {
        vec![
            untagged(&text(&model["name"])),
            bytes(number(&model["size_vram"])),
            number(&model["context_length"]).to_string(),
            until(&text(&model["expires_at"])),
        ]
    }));
    print(&table(&rows))
}

/// When a model will be unloaded.
fn until(expires_at: &str) -> String {
    const FOREVER_S: i64 = 365 * 24 * 3600;
    let Ok(at) = expires_at.parse::<jiff::Timestamp>() else { return expires_at.to_owned() };
    match at.as_second() - jiff::Timestamp::now().as_second() {
        FOREVER_S.. => "not unloaded when idle".to_owned(),
        seconds @ 120.. => format!("{} minutes from now", seconds / 60),
        seconds => format!("{} s from now", seconds.max(0)),
    }
}

/// A name of a list without the tag that Ollama's format adds.
fn untagged(name: &str) -> String {
    name.strip_suffix(":latest").unwrap_or(name).to_owned()
}

/// Describes a model of a server, or a pulled model.
pub fn show(config: &Config, args: &args::Show) -> Result<(), Error> {
    let Some(client) = Client::find(config, args.server.url.as_deref())? else {
        let mut model = args.model.clone();
        models::find(&models::caches(config), &mut model)?;
        let (json, common) = (args.json, args.server.common.clone());
        let files = args::FileOptions { models_dir: args.models_dir.clone(), model_config: None };
        let args = args::Inspect { model, verify: false, tensors: false, json, files, common };
        return inspect::inspect(config, &args);
    };
    let shown = client.ask(&Method::POST, "/api/show", &json!({"model": args.model}))?;
    if args.json {
        return print_json(&shown);
    }
    let (details, info) = (&shown["details"], &shown["model_info"]);
    let capabilities = shown["capabilities"].as_array().map_or(&[][..], Vec::as_slice);
    let arch = text(&info["general.architecture"]);
    let of_arch = |key: &str| number(&info[format!("{arch}.{key}")]).to_string();
    let mut rows = vec![
        ("architecture", text(&details["family"])),
        ("parameters", text(&details["parameter_size"])),
        ("quantization", text(&details["quantization_level"])),
        ("format", text(&details["format"])),
        ("context", format!("{} tokens", number(&details["context_length"]))),
        ("layers", of_arch("block_count")),
        ("vocabulary", of_arch("vocab_size")),
        ("can", capabilities.iter().map(text).collect::<Vec<_>>().join(", ")),
    ];
    let parameters = text(&shown["parameters"]);
    rows.extend(parameters.lines().filter_map(|line| {
        let (name, value) = line.split_once(char::is_whitespace)?;
        Some((name, value.trim().to_owned()))
    }));
    let lines: String = rows.iter().map(|(name, value)| format!("{name:<16}{value}\n")).collect();
    print(&visible(&lines))
}

/// Unloads a model of a server.
pub fn stop(config: &Config, args: &args::Stop) -> Result<(), Error> {
    let client = server(config, &args.server)?;
    let running = client.get("/api/ps")?;
    // A request for a model that was never loaded would load it.
    let shown = client.ask(&Method::POST, "/api/show", &json!({"model": args.model}))?;
    let name = text(&shown["model_info"]["general.basename"]);
    let is_it = |model: &Value| untagged(&text(&model["model"])) == name;
    if !models_of(&running).iter().any(is_it) {
        note(format_args!("{name} is not loaded"));
        return Ok(());
    }
    client.ask(&Method::POST, "/api/generate", &json!({"model": args.model, "keep_alive": 0})).map(drop)
}

/// Pulls a model through a server that serves pulled models, or else into a folder of this machine.
pub fn pull(config: &Config, args: &args::Pull) -> Result<(), Error> {
    let mut config = config.clone();
    // The folder of the configuration is that of a service.
    if args.user && args.models_dir.models_dir.is_none() {
        config.models.dir = None;
    }
    let is_local = args.user || args.models_dir.models_dir.is_some();
    let client = if is_local { None } else { Client::find(&config, args.server.url.as_deref())? };
    if let Some(client) = client {
        match pull_through(&client, &args.name) {
            // The server serves the models of its configuration alone.
            Err(Error::Remote { status: Some(404), .. }) if args.server.url.is_none() => note(format_args!(
                "the server at {} downloads no models: this command pulls instead",
                client.url()
            )),
            pulled => return pulled,
        }
    }
    print(&format!("{}\n", pull::pull(&config, &args.name)?.display()))
}

/// Pulls a model into the folder of a server, which serves it then.
fn pull_through(client: &Client, name: &ModelName) -> Result<(), Error> {
    let bar = Bar::bytes(name.to_string());
    let (mut file, mut is_complete) = (String::new(), false);
    client.stream("/api/pull", &json!({"model": name.to_string()}), |line| {
        let status = text(&line["status"]);
        is_complete = status == "success";
        if let (Some(total), Some(completed)) = (line["total"].as_u64(), line["completed"].as_u64()) {
            if status != file {
                bar.set_total(total);
                bar.skip(completed);
                file.clone_from(&status);
            }
            bar.set(completed);
        }
        bar.say(&status);
        Ok(true)
    })?;
    drop(bar);
    if !is_complete {
        return Err(
            client.failed("the answer ended before the model was complete; pull again to continue".into())
        );
    }
    say(format_args!("{name} is served at {}", client.url()));
    Ok(())
}

/// Deletes a model of a server. A server of this project says before the confirmation that it does not delete the model.
fn rm_from(client: &Client, model: &str, yes: bool) -> Result<(), Error> {
    let asked = json!({"model": model});
    let shown = client.ask(&Method::POST, "/api/show", &asked)?;
    if let Some(why) = shown["kept_because"].as_str() {
        return Err(client.failed(why.to_owned()));
    }
    let what = format!("remove {model} from the server at {}", client.url());
    if !yes && !models::confirm(&what)? {
        return Err(Error::Argument(format!("{model} was not removed")));
    }
    client.ask(&Method::DELETE, "/api/delete", &asked)?;
    say(format_args!("removed {model}"));
    Ok(())
}

/// Removes pulled models, of a server or of this user.
pub fn rm(config: &Config, args: &args::Rm) -> Result<(), Error> {
    let client = Client::find(config, args.server.url.as_deref())?;
    for model in &args.model {
        if let Some(client) = &client {
            match rm_from(client, model, args.yes) {
                // The server does not serve the model.
                Err(Error::Remote { status: Some(404), problem, .. }) if args.server.url.is_none() => {
                    note(format_args!("{problem}: looking in this user's folder"));
                }
                removed => {
                    removed?;
                    continue;
                }
            }
        }
        models::remove(config, &names::read_name(model).map_err(HubError::from)?, args.yes)?;
    }
    Ok(())
}
