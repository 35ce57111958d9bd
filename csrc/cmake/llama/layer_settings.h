// Put in front of ggml's Vulkan sources by the compiler (-include), which are themselves not touched: they name types of
// VK_EXT_layer_settings, which headers older than 1.3.272, as Debian 12 has them, are without. Nothing is done with them
// unless ggml is built to be validated; the driver passes over a structure that it does not know.
#ifndef BMOE_LLAMA_LAYER_SETTINGS_H
#define BMOE_LLAMA_LAYER_SETTINGS_H

#include <vulkan/vulkan_core.h>

#if !defined(VK_EXT_layer_settings)
#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT : int32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char *pLayerName;
    const char *pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void *pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> &settings)
        : settingCount(static_cast<uint32_t>(settings.size())), pSettings(settings.data()) {}
    int32_t sType = 1000496000;
    const void *pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT *pSettings;
};

}  // namespace vk
#endif

#endif
