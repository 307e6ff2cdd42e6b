//! The vision tower of a model in a GGUF file of its own (`mmproj`).
//!
//! Its metadata becomes fields of the model's `config.json`, and its tensors get Hugging Face names, as if the tower
//! were part of the model's checkpoint. The architecture's [`GgufTower`]s say how. What the file has for sound gets
//! Hugging Face names too: models skip it in every format. A file that is damaged, or belongs to another model, is
//! refused as a whole: a tower with a missing or an unknown part computes something else.

use serde_json::Value as Json;

use super::arch::{
    ARCHITECTURE, GgufArch, GgufTensors, GgufTower, Keys, NamedTensor, TowerKeys, find_or_first,
};
use super::generated::layer_part;
use super::header::{HeaderError, Metadata, TensorInfo, read_header};
use crate::checkpoint::error::short;

/// The header of a tower's file.
pub(in crate::checkpoint) struct TowerFile<'a> {
    /// The fields of `config.json`, an object.
    pub fields: Json,
    /// The tensors in the order of their bytes.
    pub tensors: Vec<NamedTensor<'a>>,
}

impl<'a> TowerFile<'a> {
    /// Reads the tower in `bytes` of the model whose first part is `model`.
    pub(super) fn read(
        bytes: &'a [u8],
        model: &[u8],
        archs: &[&'static GgufArch],
    ) -> Result<TowerFile<'a>, HeaderError> {
        let model = read_header(model)?.metadata;
        let arch = find_or_first(archs, &model)?;
        let header = read_header(bytes)?;
        let tower = tower_of(arch, &header.metadata)?;
        let tensors = GgufTensors::new(header.tensors.iter().map(|info| (bytes, info.clone())).collect());
        let keys = TowerKeys { metadata: &header.metadata, tensors: &tensors };
        keys.check(tower.pixels, &Keys::new(arch, &model))?;
        let fields = (tower.config)(&keys)?;
        let named = |info: TensorInfo<'a>| {
            let name = of_sound(info.name).or_else(|| (tower.tensor)(info.name, &tensors));
            match name {
                Some(name) => Ok(NamedTensor { name, info, interleaved: None }),
                None => {
                    let problem =
                        format!("is no part of a vision tower with the projector {:?}", tower.projector);
                    Err(HeaderError::tensor(info.name, problem))
                }
            }
        };
        let tensors = header.tensors.into_iter().map(named).collect::<Result<_, HeaderError>>()?;
        Ok(TowerFile { fields, tensors })
    }
}

/// The description of the towers of `arch` with the projector that this metadata names.
fn tower_of(arch: &'static GgufArch, metadata: &Metadata) -> Result<&'static GgufTower, HeaderError> {
    let kind = metadata.text(ARCHITECTURE)?.unwrap_or_default();
    if kind != "clip" {
        let problem = format!("is {:?}; expected \"clip\", a vision tower", short(kind));
        return Err(HeaderError::key(ARCHITECTURE, problem));
    }
    // The second one is in files of older converters, and in those of models that may also hear.
    let keys = ["clip.projector_type", "clip.vision.projector_type"];
    let key = keys.into_iter().find(|key| metadata.has(key)).unwrap_or(keys[0]);
    let projector = metadata.text(key)?;
    arch.towers.iter().find(|tower| projector == Some(tower.projector)).ok_or_else(|| {
        let found = projector.map_or("is missing".into(), |name| format!("is {:?}", short(name)));
        let names: Vec<String> = arch.towers.iter().map(|tower| format!("{:?}", tower.projector)).collect();
        let expected = match names.is_empty() {
            false => format!("expected {}", names.join(" or ")),
            true => "no images are computed for them".into(),
        };
        let problem = format!("{found}; for models of the architecture {:?}, {expected}", arch.name);
        HeaderError::key(key, problem)
    })
}

/// The Hugging Face name of a tensor that computes sound; `None` for others.
fn of_sound(name: &str) -> Option<String> {
    let embedder = name.strip_prefix("mm.a.").map(|rest| format!("embed_audio.{rest}"));
    embedder.or_else(|| name.strip_prefix("a.").map(|rest| format!("audio_tower.{rest}")))
}

/// The parts of the name of a tensor in a layer of a tower: 3, `attn_q` and `weight` of `v.blk.3.attn_q.weight`.
pub fn tower_layer_part(name: &str) -> Option<(u32, &str, &str)> {
    layer_part(name.strip_prefix("v.")?).filter(|(.., what)| *what != "scale")
}
