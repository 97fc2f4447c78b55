//! All benches of the core. See the crate `embcache_benches`.

mod admission;
mod admission_ram;
mod big;
mod births;
mod checkpoint;
mod checkpoint_delta;
mod checkpoint_linked;
mod checkpoint_null_disk;
mod dedupe;
mod device;
mod host_hit;
mod index;
mod io;
mod kernels;
mod serving;
mod serving_times;
mod sizing;
mod ssd;
mod ssd_placed;
mod ssd_write;
mod ssd_write_full;
mod sweeps;
mod sweeps_100m;
mod sweeps_ssd;

use std::process::ExitCode;

use embcache_benches::run;

fn main() -> ExitCode {
    if big::reopens() {
        return ExitCode::SUCCESS;
    }
    run(&[
        ("admission", admission::group()),
        ("admission_ram", admission_ram::group()),
        ("big", big::group()),
        ("births", births::group()),
        ("checkpoint", checkpoint::group()),
        ("checkpoint_delta", checkpoint_delta::group()),
        ("checkpoint_linked", checkpoint_linked::group()),
        ("checkpoint_null_disk", checkpoint_null_disk::group()),
        ("dedupe", dedupe::group()),
        ("device", device::group()),
        ("host_hit", host_hit::group()),
        ("index", index::group()),
        ("io", io::group()),
        ("kernels", kernels::group()),
        ("serving", serving::group()),
        ("serving_times", serving_times::group()),
        ("sizing", sizing::group()),
        ("ssd", ssd::group()),
        ("ssd_placed", ssd_placed::group()),
        ("ssd_write", ssd_write::group()),
        ("ssd_write_full", ssd_write_full::group()),
        ("sweeps", sweeps::group()),
        ("sweeps_100m", sweeps_100m::group()),
        ("sweeps_ssd", sweeps_ssd::group()),
    ])
}
