//! Objects of replies, and their fields that always have the same value.

use crate::api::wire::union::words;

/// Defines objects of replies. A field `name: T` is always present; if `T` is an `Option`, the field may be null. A field
/// `name?: T` is absent if it is `None`. A field `name | null: T` may be absent or null.
macro_rules! replies {
    ($($(#[$about:meta])* $vis:vis struct $name:ident { $(
        $(#[$note:meta])*
        $seen:vis $field:ident $(? : $absent:ty)? $(| null : $absent_or_null:ty)? $(: $present:ty)?
    ),* $(,)? })*) => { $(
        #[derive(serde::Serialize, utoipa::ToSchema)]
        $(#[$about])*
        $vis struct $name { $(
            $(#[$note])*
            $(
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schema(value_type = Option<$absent_or_null>, required = false)]
                $seen $field: Option<Option<$absent_or_null>>,
            )?
            $(
                #[serde(skip_serializing_if = "Option::is_none")]
                #[schema(nullable = false)]
                $seen $field: Option<$absent>,
            )?
            $(
                #[schema(required)]
                $seen $field: $present,
            )?
        )* }
    )* };
}
pub(in crate::api) use replies;

words! {
    /// The role of every answer.
    Assistant { Assistant = "assistant" };
    /// The type of every tool call.
    Function { Function = "function" };
    /// What OpenAI's lists call themselves.
    ListName { List = "list" };
}
