//! Where the stores' libraries are.
#![allow(unsafe_code)]

use libloading::Library;

use crate::Missing;

/// Load a library that `make rivals` found or fetched: the caller's environment names its folder in `LD_LIBRARY_PATH`.
pub(crate) fn load(name: &str) -> Result<Library, Missing> {
    // SAFETY: what RocksDB's and LMDB's libraries run when they are loaded touches nothing of ours.
    unsafe { Library::new(name) }.map_err(|error| format!("{error}; `make rivals` says why it is not there"))
}

/// The functions of a library in use, each with its header's signature.
macro_rules! calls {
    ($prefix:literal, $(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        pub(super) struct Calls {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _library: libloading::Library,
        }

        impl Calls {
            pub(super) fn of(library: libloading::Library) -> Result<Self, crate::Missing> {
                // SAFETY: the signatures are the header's, and the library lives as long as what was taken from it.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($prefix, stringify!($name), "\0").as_bytes())
                            .map_err(|error| error.to_string())?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}
pub(crate) use calls;
