use super::*;

fn tensor(name: &str, dtype: &str, shape: &[u64]) -> RecisTensor {
    RecisTensor::new(name.into(), dtype, shape.to_vec()).unwrap()
}

#[test]
fn wide_elements_come_first_and_each_tensor_starts_at_a_page() {
    let tensors = [tensor("b", "BOOL", &[7]), tensor("w", "F32", &[3, 2]), tensor("i", "I64", &[1])];
    let all: Vec<&RecisTensor> = tensors.iter().collect();
    let layout = RecisFileLayout::new(all.clone(), TensorSpacing::Pages).unwrap();
    let starts: Vec<u64> = tensors.iter().map(|tensor| layout.start(tensor)).collect();
    assert_eq!(starts, [3 * 4096, 2 * 4096, 4096]);
    assert_eq!(layout.bytes, 4 * 4096);
    let close = RecisFileLayout::new(all, TensorSpacing::Packed).unwrap();
    assert_eq!(tensors.each_ref().map(|tensor| close.start(tensor)), [4096 + 8 + 24, 4096 + 8, 4096]);
}

#[test]
fn a_header_lists_tensors_and_padding_in_file_order() {
    let tensors = [tensor("__pad.x", "U8", &[1]), tensor("w", "F32", &[])];
    let layout = RecisFileLayout::new(tensors.iter().collect(), TensorSpacing::Pages).unwrap();
    let text = std::str::from_utf8(&layout.header[8..]).unwrap();
    assert_eq!(
        text.trim_end(),
        r#"{"w":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"___pad.0":{"dtype":"U8","shape":[4092],"data_offsets":[4,4096]},"#
            .to_owned()
            + r#""__pad.x":{"dtype":"U8","shape":[1],"data_offsets":[4096,4097]},"___pad.1":{"dtype":"U8","shape":[4095],"data_offsets":[4097,8192]}}"#
    );
    assert_eq!(layout.header[..8], (4096_u64 - 8).to_le_bytes());
}

#[test]
fn tensors_that_no_file_can_hold_are_rejected() {
    assert!(RecisTensor::new("a".into(), "F31", vec![]).is_err());
    assert!(RecisTensor::new("a".into(), "F32", vec![1 << 40, 1 << 40]).is_err());
    assert!(RecisTensor::new("a".into(), "F32", vec![1 << 61]).is_err());
    let duplicates = [tensor("a", "U8", &[1]), tensor("a", "F32", &[1])];
    assert!(RecisFileLayout::new(duplicates.iter().collect(), TensorSpacing::Packed).is_err());
    let huge = [tensor("a", "U8", &[(1 << 62) - 1]), tensor("b", "U8", &[(1 << 62) - 1])];
    assert!(RecisFileLayout::new(huge.iter().collect(), TensorSpacing::Pages).is_err());
}
