//! A folder on the disk under test. It is removed after its process exits for any reason.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A scratch folder. Dropping it removes it. If this process dies before, another process removes it.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    janitor: Child,
}

impl Scratch {
    /// Creates a folder under `EMBCACHE_BENCH_DIR` (by default the build's `target`) on a disk with at least `bytes`
    /// free; or returns the reason for the failure.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let usual = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target");
        let parent = std::env::var_os("EMBCACHE_BENCH_DIR").map_or_else(usual, PathBuf::from);
        let free = free_bytes(&parent).map_err(|error| format!("cannot inspect {}: {error}", parent.display()))?;
        if free < bytes {
            return Err(format!(
                "{} has {:.1} GB free and this bench takes {:.1} GB: free some, or set EMBCACHE_BENCH_DIR to a folder on a larger disk",
                parent.display(),
                free as f64 / 1e9,
                bytes as f64 / 1e9
            ));
        }
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(&parent);
        let path = folder.map_err(|error| format!("cannot make a folder in {}: {error}", parent.display()))?.keep();
        // The remover reads until this process's side of the pipe is closed. Its own process group keeps a terminal's
        // Ctrl-C from it.
        let janitor = Command::new("sh")
            .args(["-c", "read -r _; rm -rf -- \"$0\""])
            .arg(&path)
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot run sh: {error}"))?;
        Ok(Self { path, janitor })
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        // If this fails, files are left over. The next run detects that when it checks the free bytes.
        let _ = self.janitor.wait();
    }
}

/// Bytes that this user can still write to the disk of `path`.
fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and both it and the struct outlive the call.
    if unsafe { libc::statvfs(path.as_ptr(), &raw mut found) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(found.f_bavail * found.f_frsize)
}
