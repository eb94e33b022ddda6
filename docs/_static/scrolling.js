// Let the keyboard reach code and tables that are wider than the window: only boxes in the order of focus scroll by arrow keys.
document.addEventListener("DOMContentLoaded", () => {
  const boxes = document.querySelectorAll("pre, .table-wrapper, .scrolls")
  const update = () => {
    for (const box of boxes) {
      if (box.scrollWidth > box.clientWidth + 1) {
        box.tabIndex = 0
      } else {
        box.removeAttribute("tabindex")
      }
    }
  }
  update()
  new ResizeObserver(update).observe(document.body)
})
