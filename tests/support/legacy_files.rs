//! Generated layer files of the original project.

use half::bf16;
use serde_json::{Map, Value, json};

use super::checkpoints::{le_bytes, with_header};
use super::fuzz_bodies::joined;

/// A tensor of a layer file: name, scheme, element type, shape and bytes, then type, shape and bytes of its scales.
pub type LayerTensor =
    (String, &'static str, &'static str, Vec<usize>, Vec<u8>, &'static str, Vec<usize>, Vec<u8>);

/// A tensor in int8 with one scale.
pub fn symmetric(name: &str, shape: &[usize], scale: f32, q: &[i8]) -> LayerTensor {
    let q = q.iter().map(|q| *q as u8).collect();
    let scale = bf16::from_f32(scale).to_le_bytes().to_vec();
    (name.into(), "int8_symmetric", "I8", shape.to_vec(), q, "BF16", vec![], scale)
}

/// A tensor in int4 with a scale for each group.
pub fn grouped(name: &str, shape: &[usize], scales: &[f32], q: &[i8]) -> LayerTensor {
    let q = q.iter().map(|q| *q as u8).collect();
    let bytes = scales.iter().flat_map(|s| bf16::from_f32(*s).to_le_bytes()).collect();
    (name.into(), "int4_grouped", "I8", shape.to_vec(), q, "BF16", vec![scales.len()], bytes)
}

/// A tensor in int8 with a scale and a zero point.
pub fn asymmetric(name: &str, shape: &[usize], scale: f32, zero: f32, q: &[u8]) -> LayerTensor {
    let scales = le_bytes(&[scale, zero]);
    (name.into(), "int8_asymmetric", "U8", shape.to_vec(), q.to_vec(), "F32", vec![2], scales)
}

/// A layer file of these tensors.
pub fn layer_file(tensors: &[LayerTensor]) -> Vec<u8> {
    let (mut header, mut metadata, mut bytes) = (Map::new(), Map::new(), Vec::new());
    for (name, scheme, dtype, shape, q, scale_type, scale_shape, scales) in tensors {
        metadata.insert(name.clone(), json!(scheme));
        for (name, dtype, shape, data) in
            [(name.clone(), dtype, shape, q), (format!("{name}_scale"), scale_type, scale_shape, scales)]
        {
            let offsets = [bytes.len(), bytes.len() + data.len()];
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            bytes.extend_from_slice(data);
        }
    }
    header.insert("__metadata__".into(), Value::Object(metadata));
    with_header(&Value::Object(header).to_string(), &bytes)
}

/// The name and bytes of the file with the tensors that do not belong to a layer.
pub fn shared() -> (&'static str, Vec<u8>) {
    ("m_shared.safetensors", layer_file(&[asymmetric("norm.weight", &[2], 0.5, 3.0, &[3, 255])]))
}

/// A layer file with a tensor of every scheme.
pub fn layer_of_all_schemes() -> Vec<u8> {
    let q: Vec<i8> = (0..256).map(|i| (i % 15) as i8 - 7).collect();
    layer_file(&[
        symmetric("x.layers.1.q_proj", &[4, 64], 0.5, &q),
        grouped("x.layers.1.up_proj", &[4, 64], &[0.5, 0.25], &q),
        grouped("x.layers.1.odd", &[5, 30], &[0.5, 0.25], &q[..150]),
        asymmetric("x.layers.1.norm", &[64], 0.5, 0.0, &[9; 64]),
    ])
}

/// A valid input of the fuzz target for this format.
pub fn fuzz_input() -> Vec<u8> {
    joined(&shared().1, &layer_of_all_schemes())
}
