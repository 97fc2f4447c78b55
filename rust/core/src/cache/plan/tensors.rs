//! Storage of the rows that kernels use: the arena of a host tier, or tensors of a device tier in RAM.

use std::sync::Arc;

use super::state::TablePlan;
use crate::cache::rows::DeviceTensors;
use crate::error::{Error, Kind, Result};
use crate::kernels::TensorRows;
use crate::rows::{RowArena, RowLayout};
use crate::types::CacheSlot;

/// The rows of one table, for kernels.
pub(super) enum KernelRows<'a, 't> {
    Arena(Arc<RowArena>, RowLayout),
    /// The tensors have a row of the layout in each slot of the plan.
    Tensors(&'a mut DeviceTensors<'t>, RowLayout),
}

impl<'a, 't> KernelRows<'a, 't> {
    /// Returns the rows of each table. `device` has the tensors of tables with a device tier.
    ///
    /// Errors: `Input` if tensors are missing, too small, or passed for a table without a device tier.
    pub(super) fn of(tables: &[TablePlan], device: &'a mut [Option<DeviceTensors<'t>>]) -> Result<Vec<Self>> {
        let mut device: Vec<Option<&'a mut DeviceTensors<'t>>> = device.iter_mut().map(Option::as_mut).collect();
        device.resize_with(tables.len(), || None);
        tables.iter().zip(device).map(|(plan, tensors)| Self::of_table(plan, tensors)).collect()
    }

    fn of_table(plan: &TablePlan, tensors: Option<&'a mut DeviceTensors<'t>>) -> Result<Self> {
        let (table, layout) = (&plan.table, plan.table.layout);
        match (table.has_device(), tensors) {
            (true, Some(tensors)) => {
                check_tensors(tensors, layout, plan.slots_end())?;
                return Ok(Self::Tensors(tensors, layout));
            }
            (false, None) => {
                if let Some(arena) = table.lock_any()?.kernel_arena() {
                    return Ok(Self::Arena(Arc::clone(arena), layout));
                }
            }
            _ => {}
        }
        let has = if table.has_device() { "has" } else { "has not" };
        let message = format!("table {:?} {has} a device tier: give its tensors exactly then", table.config.name);
        Err(Error::new(Kind::Input, message))
    }

    /// The tensors, if the rows are on a device tier.
    pub(super) fn tensors(&self) -> Option<&DeviceTensors<'t>> {
        match self {
            Self::Arena(..) => None,
            Self::Tensors(tensors, _) => Some(tensors),
        }
    }
}

/// Errors: `Input` unless the tensors have a row of the layout in each slot below `slots`.
fn check_tensors(tensors: &DeviceTensors<'_>, layout: RowLayout, slots: CacheSlot) -> Result<()> {
    let wanted = slots as usize * layout.dim;
    let fits = tensors.weights.len() >= wanted
        && tensors.vector_slots.len() == layout.vector_slots
        && tensors.vector_slots.iter().all(|slot| slot.len() >= wanted)
        && tensors.scalars.is_some() == layout.scalar_slot
        && tensors.scalars.as_ref().is_none_or(|scalars| scalars.len() >= slots as usize);
    if fits {
        return Ok(());
    }
    Err(Error::new(
        Kind::Input,
        format!("the device tensors must hold {slots} slots of {layout:?}: grow them to Plan.required_slots"),
    ))
}

/// The addresses of tensors with rows of this layout, for a kernel. They are valid as long as the tensors are borrowed.
pub(super) fn tensor_addresses(tensors: &mut DeviceTensors<'_>, layout: RowLayout) -> TensorRows {
    let mut vector_slots = [std::ptr::null_mut(); 2];
    for (address, slot) in vector_slots.iter_mut().zip(&mut tensors.vector_slots) {
        *address = slot.as_mut_ptr();
    }
    TensorRows {
        layout,
        weights: tensors.weights.as_mut_ptr(),
        vector_slots,
        scalars: tensors.scalars.as_mut().map_or(std::ptr::null_mut(), |scalars| scalars.as_mut_ptr()),
    }
}

/// Runs `$body` with `$rows` bound to the row store in `$where`, a `&mut KernelRows`.
macro_rules! with_rows {
    ($where:expr, $rows:ident => $body:expr) => {
        match $where {
            KernelRows::Arena(arena, layout) => {
                let $rows = &ArenaRows { arena, layout: *layout };
                $body
            }
            KernelRows::Tensors(tensors, layout) => {
                let $rows = &tensor_addresses(tensors, *layout);
                $body
            }
        }
    };
}

pub(super) use with_rows;
