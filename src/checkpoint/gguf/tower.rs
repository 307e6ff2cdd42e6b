//! The vision tower of a model in a GGUF file of its own (`mmproj`).
//!
//! Its metadata becomes fields of the model's `config.json`, and its tensors get Hugging Face names, as if the tower
//! were part of the model's checkpoint. The architecture's [`GgufTower`] says how. A file that is damaged, or belongs
//! to another model, is refused as a whole: a tower with a missing or an unknown part computes something else.

use serde_json::Value as Json;

use super::arch::{ARCHITECTURE, GgufArch, GgufTensors, GgufTower, Keys, NamedTensor, find_or_first};
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
        let fields = (tower.config)(&header.metadata, &Keys::new(arch, &model))?;
        let tensors = GgufTensors::new(header.tensors.iter().map(|info| (bytes, info.clone())).collect());
        let named = |info: TensorInfo<'a>| match (tower.tensor)(info.name, &tensors) {
            Some(name) => Ok(NamedTensor { name, info, interleaved: None }),
            None => {
                let problem =
                    format!("is no part of a vision tower with the projector {:?}", tower.projector);
                Err(HeaderError::tensor(info.name, problem))
            }
        };
        let tensors = header.tensors.into_iter().map(named).collect::<Result<_, HeaderError>>()?;
        Ok(TowerFile { fields, tensors })
    }
}

/// The description of the towers of `arch`, if the file with this metadata has one of them.
fn tower_of(arch: &'static GgufArch, metadata: &Metadata) -> Result<&'static GgufTower, HeaderError> {
    let kind = metadata.text(ARCHITECTURE)?.unwrap_or_default();
    if kind != "clip" {
        let problem = format!("is {:?}; expected \"clip\", a vision tower", short(kind));
        return Err(HeaderError::key(ARCHITECTURE, problem));
    }
    // Older converters wrote the second one.
    let keys = ["clip.projector_type", "clip.vision.projector_type"];
    let key = keys.into_iter().find(|key| metadata.has(key)).unwrap_or(keys[0]);
    let projector = metadata.text(key)?;
    match arch.tower {
        Some(tower) if projector == Some(tower.projector) => Ok(tower),
        tower => {
            let found = projector.map_or("is missing".into(), |name| format!("is {:?}", short(name)));
            let expected = match tower {
                Some(tower) => format!("expected {:?}", tower.projector),
                None => "no images are computed for them".into(),
            };
            let problem = format!("{found}; for models of the architecture {:?}, {expected}", arch.name);
            Err(HeaderError::key(key, problem))
        }
    }
}
