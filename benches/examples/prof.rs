#![allow(missing_docs, clippy::pedantic, clippy::unwrap_used)]
use std::sync::Arc;
use std::time::Instant;
use embcache::cache::{Lookup, Table, RowBlock};
use embcache::config::*;
use embcache::io::MemoryEngine;
use embcache::rows::*;
use embcache_benches::*;
fn main() {
    let rows: u64 = std::env::args().nth(1).map_or(2_000_000, |a| a.parse().unwrap());
    let policy = match std::env::args().nth(2).as_deref() { Some("lru") => PolicyKind::Lru, Some("lfu") => PolicyKind::Lfu, _ => PolicyKind::S3Fifo };
    let opt = OptimizerKind::RowWiseAdagrad;
    let layout = opt.layout(64);
    let cfg = TableConfig { name: "t".into(), key: 1, dim: 64, optimizer: opt, initializer: Initializer::Constant{value:0.5}, seed: 0, total_num_buckets: 4093, buckets: 0..4093,
        host_bytes: (rows + 1000) * embcache::cache::host_row_bytes(&layout, policy), device_rows: None, ssd: None, policy, on_full: OnFull::Error };
    println!("row bytes {}", embcache::cache::host_row_bytes(&layout, policy));
    let t = Table::open(cfg, None, Arc::new(MemoryEngine::default())).unwrap();
    let all: Vec<i64> = (0..rows).map(scattered_id).collect();
    let begin = Instant::now();
    for c in all.chunks(65536) {
        let headers: Vec<RowHeader> = c.iter().map(|&id| RowHeader { id, ..Default::default() }).collect();
        let v = vec![0.5_f32; c.len() * 64];
        t.import_rows(RowBlock { headers: &headers, vectors: &v }).unwrap();
    }
    println!("import {:.2} Mrow/s", rows as f64 / begin.elapsed().as_secs_f64() / 1e6);
    let l = Lookup::new(&[t.clone()], &[0]).unwrap();
    let ids = Ids::from_ranks(&zipf_ranks(2, BATCH_IDS * 20, rows, 1.05), BATCH_IDS, scattered_id);
    let mut out = vec![0.0_f32; BATCH_IDS * 64];
    for round in 0..3 {
        let (mut a, mut b, mut c, mut d) = (0.0, 0.0, 0.0, 0.0);
        for batch in ids.batches() {
            let t0 = Instant::now();
            let p = l.plan(batch, &[0, batch.len() as i64], false, false, false).unwrap();
            let t1 = Instant::now(); p.wait().unwrap();
            let t2 = Instant::now(); p.forward_sequence(&mut out, &mut [], 1).unwrap();
            let t3 = Instant::now(); drop(p);
            let t4 = Instant::now();
            a += (t1-t0).as_secs_f64(); b += (t2-t1).as_secs_f64(); c += (t3-t2).as_secs_f64(); d += (t4-t3).as_secs_f64();
        }
        let n = (20 * BATCH_IDS) as f64;
        println!("round {round}: plan {:.2} wait {:.2} gather {:.2} drop {:.2} ms/batch; {:.1} M ids/s", a*50.0, b*50.0, c*50.0, d*50.0, n/(a+b+c+d)/1e6);
    }
}
