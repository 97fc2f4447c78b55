use super::*;

fn rejects(initializer: InitializerSpec, words: &[&str]) {
    let error = RowInitializer::new(initializer, 0, 0).expect_err("a bad initializer must be refused");
    assert_eq!(error.kind(), Kind::Config);
    for word in words {
        assert!(error.to_string().contains(word), "{error} should say {word}");
    }
}

#[test]
fn invalid_values_are_rejected_by_field_and_value() {
    rejects(InitializerSpec::Constant { value: f32::NAN }, &["value", "NaN"]);
    rejects(InitializerSpec::Uniform { low: 0.5, high: 0.25 }, &["low", "0.5", "0.25"]);
    rejects(InitializerSpec::Uniform { low: f32::MIN, high: f32::MAX }, &["high"]);
    rejects(InitializerSpec::Uniform { low: 0.0, high: f32::INFINITY }, &["high", "inf"]);
    rejects(InitializerSpec::Normal { mean: 0.0, std: -1.0 }, &["std", "-1"]);
    rejects(InitializerSpec::Normal { mean: 0.0, std: 1e38 }, &["std"]);
    rejects(InitializerSpec::TruncatedNormal { mean: f32::NEG_INFINITY, std: 1.0 }, &["mean", "-inf"]);
    rejects(InitializerSpec::Linear { low: 0.0, high: f32::NAN }, &["high", "NaN"]);
}

#[test]
fn initial_values_are_bitwise_equal_on_every_instruction_set() {
    for initializer in [
        InitializerSpec::Uniform { low: -0.3, high: 0.7 },
        InitializerSpec::Normal { mean: 0.1, std: 0.3 },
        InitializerSpec::TruncatedNormal { mean: 0.1, std: 0.3 },
        InitializerSpec::Linear { low: 0.1, high: 0.7 },
    ] {
        let birth = RowInitializer::new(initializer, 1, 2).expect("valid");
        for id in -500..500 {
            let rows = InstructionSet::all().into_iter().map(|isa| {
                let mut weights = [0.0; 77];
                birth.fill_all_on(isa, std::iter::once((id, &mut weights[..])));
                weights.map(f32::to_bits)
            });
            let rows: Vec<_> = rows.collect();
            assert!(rows.windows(2).all(|pair| pair[0] == pair[1]), "{initializer:?} id {id}");
        }
    }
}

#[test]
fn rows_initialized_in_a_batch_equal_rows_initialized_alone() {
    for initializer in [
        InitializerSpec::Constant { value: 0.5 },
        InitializerSpec::Uniform { low: -0.3, high: 0.7 },
        InitializerSpec::Normal { mean: 0.1, std: 0.3 },
        InitializerSpec::TruncatedNormal { mean: 0.1, std: 0.3 },
        InitializerSpec::Linear { low: 0.1, high: 0.7 },
    ] {
        let birth = RowInitializer::new(initializer, 1, 2).expect("valid");
        for dim in [1, 16, 64, 77, 130] {
            let ids = [-5, 7, i64::MAX, 0, i64::MIN];
            let (mut together, mut alone) = (vec![f32::NAN; ids.len() * dim], vec![f32::NAN; ids.len() * dim]);
            birth.fill_all(ids.into_iter().zip(together.chunks_mut(dim)));
            ids.into_iter().zip(alone.chunks_mut(dim)).for_each(|(id, weights)| birth.fill(id, weights));
            let bits = |rows: &[f32]| rows.iter().map(|weight| weight.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&together), bits(&alone), "{initializer:?} of width {dim}");
        }
    }
}

#[test]
fn a_uniform_weight_never_reaches_the_upper_bound() {
    // Just above 1, float32 is coarser than 24 bits of this interval, so half of the topmost words would round up
    // to the bound.
    let (low, high) = (1.0, 1.000_000_2);
    let birth = RowInitializer::new(InitializerSpec::Uniform { low, high }, 1, 2).expect("valid");
    let mut weights = vec![0.0; 10_000];
    birth.fill(5, &mut weights);
    assert!(weights.iter().all(|&weight| (low..high).contains(&weight)));
}

#[test]
fn ln_agrees_with_the_platforms() {
    let mut value = 1e-12_f64;
    while value < 1e3 {
        assert!((ln(value) - value.ln()).abs() <= 1e-14 * value.ln().abs().max(1.0), "ln({value})");
        value *= 1.001;
    }
}

/// The expected values are those of Python's `statistics.NormalDist().inv_cdf`, which are accurate to 1e-15.
#[test]
fn quantiles_agree_with_a_double_precision_source() {
    for (p, expected) in [
        (0.5, 0.0),
        (0.975, 1.959_963_984_540_054),
        (0.841_344_746_068_542_9, 1.0),
        (0.99, 2.326_347_874_040_841),
        (0.999_9, 3.719_016_485_455_709),
        (1e-6, -4.753_424_308_822_899),
        (1.164_153_218_269_348_1e-10, -6.337_957_754_553_789),
        (NORMAL_CDF_AT_TWO, 2.0),
    ] {
        let got = normal_quantile(p);
        assert!(
            (got - expected).abs() <= 2e-7 * f64::max(1.0, expected.abs()),
            "quantile({p}) is {got}, not {expected}"
        );
        let mirrored = normal_quantile(1.0 - p);
        assert!(
            (got + mirrored).abs() < 1e-7 * f64::max(1.0, got.abs()),
            "quantile({p}) and its mirror image {mirrored}"
        );
    }
}
